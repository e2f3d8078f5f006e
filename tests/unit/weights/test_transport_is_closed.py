"""A publish gives back the memory of the transport that it used, also where layout `sharded` takes its
place.
"""

from types import SimpleNamespace

from megagrpo.weights.publisher import PublishStats
from megagrpo.weights.remote_publisher import RemotePublisher


class Transport:
    """Counts how often it is closed."""

    def __init__(self):
        self.plan, self.context, self.closed = SimpleNamespace(grid=SimpleNamespace(replicas=1)), None, 0

    def close(self):
        self.closed += 1


def test_the_full_transport_is_closed_when_the_sharded_one_is_taken(monkeypatch):
    full, sharded = Transport(), Transport()
    publisher = RemotePublisher(None, None, 0, full, sharded=sharded)
    monkeypatch.setattr(publisher, "_transfer", lambda *arguments: PublishStats(0, 0, 0))

    def take_sharded(*arguments):
        publisher.transport = sharded
        return ["taken"]

    monkeypatch.setattr(publisher, "_try_sharded", take_sharded)
    publisher.publish(0)
    assert (full.closed, publisher.transport) == (1, sharded)
