"""A group of trainer ranks and engine ranks in threads of this process: what is received, and that nothing
waits for ever.
"""

import threading
import time
from dataclasses import replace

import pytest
import torch

from megagrpo.wire.bucket_manifest import (
    BucketError,
    BucketManifest,
    TensorEntry,
    checksum_of,
    open_tensors,
)
from megagrpo.wire.transfer_group import (
    GroupAddress,
    TransferGroup,
    hold_store,
    own_address_towards,
)


def in_threads(*steps):
    """Run steps at the same time; return their results, exceptions among them."""
    results = [None] * len(steps)

    def run(number):
        try:
            results[number] = steps[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def make_groups(trainers, engines, timeout_seconds=20.0):
    store, port = hold_store("127.0.0.1", timeout_seconds)
    address = GroupAddress("megagrpo_test", "gloo", "127.0.0.1", port, trainers, trainers + engines)
    return in_threads(
        lambda: TransferGroup(address, 0, store=store),
        *(lambda rank=rank: TransferGroup(address, rank) for rank in range(1, address.world_size)),
    )


def message(sender, *pieces):
    return {
        "sender": sender,
        "trainer_rank": 10 + sender,
        "pieces": [[number, [list(side) for side in place]] for number, place in pieces],
    }


def test_slices_of_two_trainer_ranks_come_together_on_each_engine_rank():
    tensors = [torch.arange(24.0).reshape(4, 6), torch.randn(4, 6)]  # what engine rank 0, 1 keeps
    entries = tuple(
        TensorEntry("a", "float32", (4, 6), 0, 96, checksum_of(tensor), rank)
        for rank, tensor in enumerate(tensors)
    )
    messages = [
        [message(0, (rank, ((0, 4), (0, 2)))), message(1, (rank, ((0, 4), (2, 6))))] for rank in range(2)
    ]
    manifest = BucketManifest(
        3, "group", {"group": "megagrpo_test", "messages": messages}, "sharded", entries
    )
    first, second, *engines = make_groups(2, 2)
    columns = [(first, slice(0, 2)), (second, slice(2, 6))]
    *sent, memory_0, memory_1 = in_threads(
        *(
            lambda group=group, part=part: [
                group.send(tensors[rank][:, part].contiguous().reshape(-1).view(torch.uint8), rank)
                for rank in (0, 1)
            ]
            for group, part in columns
        ),
        *(lambda engine=engine: engine.receive(manifest) for engine in engines),
    )
    assert not any(isinstance(result, Exception) for result in sent)
    for rank, memory in enumerate((memory_0, memory_1)):
        assert torch.equal(dict(open_tensors(manifest, rank, memory=memory))["a"], tensors[rank])


def test_full_tensors_cross_once_and_are_passed_on_inside_the_engine():
    tensor = torch.randn(3, 5).to(torch.bfloat16)
    entries = (TensorEntry("a", "bfloat16", (3, 5), 0, 30, checksum_of(tensor)),)
    messages = [[message(0, (0, ((0, 3), (0, 5))))]]
    manifest = BucketManifest(3, "group", {"group": "megagrpo_test", "messages": messages}, "full", entries)
    trainer, *engines = make_groups(1, 3)
    _, *memories = in_threads(
        lambda: trainer.send(tensor.reshape(-1).view(torch.uint8), 0),
        *(lambda engine=engine: engine.receive(manifest) for engine in engines),
    )
    for rank, memory in enumerate(memories):
        assert torch.equal(dict(open_tensors(manifest, rank, memory=memory))["a"], tensor)


ENTRY = TensorEntry("a", "float32", (4,), 0, 16, "00000000", 0)
MANIFEST = BucketManifest(
    3, "group", {"group": "megagrpo_test", "messages": [[message(0, (0, ((0, 4),)))]]}, "sharded", (ENTRY,)
)


def test_a_rank_that_sends_nothing_is_named_in_time():
    _, engine = make_groups(1, 1, timeout_seconds=1.0)
    started = time.monotonic()
    with pytest.raises(
        BucketError,
        match=r"version 3: trainer rank 10 sent nothing: .*Timed out waiting "
        r"1000ms",
    ):
        engine.receive(MANIFEST)
    assert time.monotonic() - started < 5


def test_a_rank_that_receives_nothing_ends_the_wait_of_the_sender():
    trainer, engine = make_groups(1, 1, timeout_seconds=1.0)
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
        trainer.send(torch.zeros(1_000_000, dtype=torch.uint8), 0)
    engine.leave()


def test_a_member_that_leaves_is_noticed_at_once():
    trainer, engine = make_groups(1, 1, timeout_seconds=30.0)
    trainer.leave()
    started = time.monotonic()
    with pytest.raises(BucketError, match=r"trainer rank 10 sent nothing: .*closed by peer"):
        engine.receive(MANIFEST)
    assert time.monotonic() - started < 5


def test_a_member_that_never_comes_ends_the_joining():
    store, port = hold_store("127.0.0.1", 1.0)
    with pytest.raises(RuntimeError, match="timeout"):
        TransferGroup(GroupAddress("megagrpo_test", "gloo", "127.0.0.1", port, 1, 2), 0, store=store)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"location": {"group": "megagrpo_other", "messages": []}},
            "bucket of group megagrpo_other: this engine rank has joined megagrpo_test",
        ),
        (
            {"location": {"group": "megagrpo_test", "messages": [[message(0, (0, ((1, 5),)))]]}},
            r"'a': a piece at .*1, 5.* of a tensor .*\[4\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, named):
    trainer, engine = make_groups(1, 1)
    _, refused = in_threads(
        lambda: trainer.send(torch.zeros(16, dtype=torch.uint8), 0) if "other" not in named else None,
        lambda: engine.receive(replace(MANIFEST, **change)),
    )
    with pytest.raises(BucketError, match=named):
        raise refused


def test_the_way_to_a_loopback_address_is_a_loopback_address():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
