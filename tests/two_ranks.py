"""Runs the `work(rank)` of a test's file on two ranks over gloo, in processes of their own: what tests need
that look at an exchange itself. Whole workers are launched by `distributed/torchrun_launch.py`.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist


def run_on_two_ranks(file: str) -> list[str]:
    """Return what each rank printed; an AssertionError shows the output of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, file, str(rank), str(Path(folder) / "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
    return outputs


def main(file: str, rank: int, store: str) -> None:
    """Be one of the ranks."""
    work = runpy.run_path(file)["work"]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    work(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
