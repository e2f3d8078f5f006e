"""A publish is one transaction: committed whole, or given up so that the engine refuses to serve."""

import pytest

from megagrpo.weights.export import ExportStats
from megagrpo.weights.local_publisher import LocalPublisher


class Exporter:
    """Yields two tensors, or fails between them."""

    def __init__(self, fails=False):
        self.fails, self.stats = fails, ExportStats(gathered_bytes=10, broadcast_bytes=5, exported_bytes=100)

    def tensors(self):
        yield "a", 1
        if self.fails:
            raise RuntimeError("a peer went away")
        yield "b", 2


class Engine:
    """Records the calls of the contract."""

    def __init__(self):
        self.calls = []

    def begin_update(self, version):
        self.calls.append(("begin", version))

    def load(self, tensors):
        self.calls.append(("load", list(tensors)))

    def commit_update(self, version):
        self.calls.append(("commit", version))

    def abort_update(self):
        self.calls.append(("abort",))


def test_a_publish_begins_loads_and_commits_one_version():
    engine = Engine()
    stats = LocalPublisher(Exporter(), engine).publish(3)
    assert engine.calls == [("begin", 3), ("load", [("a", 1), ("b", 2)]), ("commit", 3)]
    assert (stats.version, stats.received_bytes, stats.loaded_bytes) == (3, 15, 100)


def test_a_publish_that_fails_is_given_up_and_its_cause_is_shown():
    engine = Engine()
    with pytest.raises(RuntimeError, match="a peer went away"):
        LocalPublisher(Exporter(fails=True), engine).publish(3)
    assert engine.calls == [("begin", 3), ("abort",)]
