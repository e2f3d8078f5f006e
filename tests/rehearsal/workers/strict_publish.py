"""The first publish of four ranks over a strict NCCL: with the communicator of `device_id`, and without."""

import os
import sys
import tempfile
from pathlib import Path

import strict_nccl
import torch
from small_models import DENSE, FP32, build_model

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed" / "workers"))
from receiving_engine import publisher_of
from rehearse import case, run_cases

from megagrpo.device import device as device_module
from megagrpo.parallel.groups import build_groups, destroy_groups
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.weights.plan.targets import EngineGrid

strict_nccl.register()
device_module.backend = lambda: "strict"
SCRATCH = Path(tempfile.gettempdir(), f"strict_nccl_{os.environ['MASTER_PORT']}")


def _first_publish(device: torch.device | None) -> str:
    """Two stages of two ranks, one replica: only the ranks of one stage send, bucket by bucket."""
    device_module.process_group_device = lambda: device
    groups = build_groups(ParallelLayout(4, tp=2, pp=2), 60)
    try:
        model = build_model(DENSE, FP32, False, groups)
        publisher_of(model, EngineGrid(1, 1), "disk", torch.float32, SCRATCH).publish(1)
        return "published"
    finally:
        destroy_groups()


@case
def with_the_communicator_of_device_id():
    return _first_publish(torch.device("cuda", 0))


@case
def without_it():
    return _first_publish(None)


if __name__ == "__main__":
    run_cases()
