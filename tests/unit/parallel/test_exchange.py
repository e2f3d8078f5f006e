"""Two ranks over gloo tell each other plain values, with no pickle; what can't be told fails on both."""

import torch.distributed as dist
from torch.distributed import distributed_c10d
from two_ranks import run_on_two_ranks

from megagrpo.parallel.groups import all_gather_metadata


def work(rank: int) -> None:
    """What each rank does."""
    distributed_c10d._pickler = distributed_c10d._unpickler = None  # torch's object collectives need them
    values = [{(0, 1): 0.5, (0, 2): float("inf")}, ["long" * 10_000, None]]
    assert all_gather_metadata(values[rank]) == values
    assert all_gather_metadata(None) == [None, None]
    alone = [dist.new_group([one]) for one in range(2)]
    assert all_gather_metadata(rank, alone[rank]) == [rank]
    try:
        all_gather_metadata(object() if rank == 1 else "fine")
    except TypeError as error:
        print(f"refused: {error}")


def test_ranks_tell_each_other_plain_values_and_fail_alike():
    for output in run_on_two_ranks(__file__):
        assert "refused: rank 1: builtins.object is not a plain value" in output
