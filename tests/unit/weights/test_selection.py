"""What is sent is a selection's and how is a transport's; a publish that failed anywhere leaves nothing to
build changes on.
"""

from types import SimpleNamespace

import pytest

from megagrpo.weights.from_config import TRANSPORTS
from megagrpo.weights.publisher import PublishError
from megagrpo.weights.remote_publisher import RemotePublisher
from megagrpo.weights.selection.base import NO_CHECKSUM, Everything, Region, SelectedBlocks, SelectedBucket
from megagrpo.weights.selection.changed_weights import Changes
from megagrpo.weights.transports.base import Transport
from megagrpo.wire.bucket_manifest import Patch, TensorEntry


def public_methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


def test_a_transport_is_twelve_methods_at_most_and_none_adds_to_them():
    contract = public_methods(Transport)
    assert len(contract) <= 12, sorted(contract)
    for kind in TRANSPORTS.values():
        assert public_methods(kind) == contract, kind


def context_of(**options):
    reader = SimpleNamespace(forget=lambda: None)
    return SimpleNamespace(reader=reader, rank=0, **options)


class Carrier:
    """A transport that carries nothing."""

    def __init__(self):
        self.plan, self.context = SimpleNamespace(grid=SimpleNamespace(replicas=2)), context_of()

    def close(self):
        pass


def test_changes_are_to_the_last_version_that_all_engines_took_and_to_none_after_a_failure(monkeypatch):
    """Also where another rank failed before this one had begun: ranks must not differ in what they send."""
    engine = SimpleNamespace(abort_update=lambda: None)
    publisher = RemotePublisher(None, engine, 0, Carrier(), Changes)
    assert publisher.selection.base_version is None
    publisher.selection.open([0, 1])
    publisher.selection.commit(3)
    assert publisher.selection.base_version == 3

    def fail(*arguments):
        raise PublishError("rank 1: weight version 4: begin: the server went away")

    monkeypatch.setattr(publisher, "_transfer", fail)
    with pytest.raises(PublishError):
        publisher.publish(4)
    assert publisher.selection.base_version is None


def test_everything_is_all_slices_of_the_replicas_that_are_published_to():
    transfers = [SimpleNamespace(replica=replica, nbytes=10 + replica) for replica in (0, 1, 0, 2)]
    plan = SimpleNamespace(transfer_bytes=lambda transfer: transfer.nbytes)
    selection = Everything(context_of(plan=plan, sends=[[], transfers]))
    selection.open([0, 2])
    bucket = selection.select(1)
    assert bucket.sends == [transfers[0], transfers[2], transfers[3]]
    assert (bucket.number, bucket.base, bucket.planned_bytes, bucket.nbytes) == (1, None, 32, 32)
    selection.open([0, 2], 7)  # whatever the engines hold
    assert selection.select(1) == bucket and selection.base_version is None


ENTRY = TensorEntry("w", "float32", (4,), 64, 16, "0badc0de", 1)


def test_a_tensor_that_is_left_out_is_an_entry_of_no_bytes_which_loads_nothing():
    bucket = SelectedBucket(0, (), 16, 0, base=3, left_out=frozenset({5}))
    left = bucket.describe(ENTRY, 5, (0, 2))
    assert (left.offset, left.nbytes, left.checksum, left.patches) == (0, 0, NO_CHECKSUM, ())
    assert bucket.describe(ENTRY, 6, (0, 2)) == ENTRY
    transfers = [SimpleNamespace(target=position) for position in (4, 5, 6)]
    assert [transfer.target for transfer in bucket.keep(transfers)] == [4, 6]


def test_blocks_take_the_place_of_slices_and_are_dropped_once_they_are_where_they_go():
    patch = Patch(0, 4, 1, 1, 2, "80")
    region = Region(128, 8, 2, (patch,), "12345678")
    bucket = SelectedBucket(0, (), 16, 8, base=3, blocks=SelectedBlocks([[]], ["block"], {(0, 2): region}))
    changed, same = bucket.describe(ENTRY, 5, (0, 2)), bucket.describe(ENTRY, 5, (0, 3))
    assert (changed.offset, changed.nbytes, changed.patches) == (128, 8, (patch,))
    assert (same.nbytes, same.patches) == (0, ())
    assert bucket.blocks.region((0, 3)).checksum == NO_CHECKSUM
    assert bucket.keep([SimpleNamespace(target=5)]) == []
    dropped = bucket.without_blocks()
    assert dropped.blocks.blocks == () and dropped.blocks.regions == bucket.blocks.regions
