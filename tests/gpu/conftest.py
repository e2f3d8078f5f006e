"""Tests that need a GPU: skipped, with the reason, where there is none."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("distributed", "end_to_end")]


def missing() -> str | None:
    """Return why these tests cannot run here; None where they can."""
    import torch

    from megagrpo.device.device import MINIMUM_CUDA_TORCH

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
        return f"no GPU: torch {torch.__version__} is built {built}, {torch.cuda.device_count()} devices"
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return None if found >= MINIMUM_CUDA_TORCH else f"torch {torch.__version__} is too old for a GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
