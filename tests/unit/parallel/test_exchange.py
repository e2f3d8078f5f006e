"""Two ranks over gloo tell each other plain values, with no pickle; what can't be told fails on both."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megagrpo.parallel.groups import all_gather_metadata


def work(rank: int, store: str) -> None:
    """What each rank does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    distributed_c10d._pickler = distributed_c10d._unpickler = None  # of torch's object collectives
    values = [{(0, 1): 0.5, (0, 2): float("inf")}, ["long" * 10_000, None]]
    assert all_gather_metadata(values[rank]) == values
    assert all_gather_metadata(None) == [None, None]
    alone = [dist.new_group([one]) for one in range(2)]
    assert all_gather_metadata(rank, alone[rank]) == [rank]
    try:
        all_gather_metadata(object() if rank == 1 else "fine")
    except TypeError as error:
        print(f"refused: {error}")
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_tell_each_other_plain_values_and_fail_alike(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
            assert "refused: rank 1: builtins.object is not a plain value" in output
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
