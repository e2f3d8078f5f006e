"""The ranks of an SGLang engine tell each other JSON: no pickle is made or read."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megagrpo.host.sglang.updates import gather


def work(rank: int, store: str) -> None:
    """What each rank does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    distributed_c10d._pickler = distributed_c10d._unpickler = None  # of torch's object collectives
    values = [None, {"first": {"dtype": "float32", "shape": [2, 3]}, "long": "ö" * 100_000}]
    assert gather(values[rank], None) == values
    assert gather(rank, dist.new_group([0, 1])) == [0, 1]
    dist.destroy_process_group()


def test_engine_ranks_of_unlike_answers_gather_them_without_a_pickle(tmp_path):
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
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
