"""Every recipe in configs/ fits the GPUs that its first lines name: counted on a model without memory.

Not measured: what CUDA, NCCL and workspaces hold (3 GB are set aside), and fragmentation.
"""

from pathlib import Path

import pytest

GPU = 80e9
SET_ASIDE = 3e9
RECIPES = [path.name for path in sorted(Path("configs").glob("*.yaml")) if path.name != "gpu_base.yaml"]
# the models' own reports, in total
PARAMETERS = {"qwen3_8b_gsm8k_grpo.yaml": 8_190_735_360, "llama3_8b_dapo.yaml": 8_030_261_248}


@pytest.fixture
def held(results_of, request):
    return results_of("fake_worlds.py")[request.param]


@pytest.mark.parametrize(("held", "total"), PARAMETERS.items(), indirect=["held"], ids=list(PARAMETERS))
def test_two_tensor_parallel_ranks_hold_the_published_number_of_parameters(held, total):
    """Norms are on both: less than a thousandth more."""
    assert total <= 2 * held["parameters"] < 1.001 * total


@pytest.mark.parametrize("held", RECIPES, indirect=True)
def test_an_update_fits_while_the_engine_sleeps(held):
    parts = ("weights", "gradients", "optimizer", "reference", "activations")
    assert sum(held[part] for part in parts) + SET_ASIDE < GPU, held


@pytest.mark.parametrize("held", RECIPES, indirect=True)
def test_an_engine_finds_room_for_its_weights_and_ten_gigabytes_of_cache(held):
    parts = ("weights", "gradients", "optimizer", "reference")
    free = GPU - SET_ASIDE - sum(held[part] for part in parts)
    assert 0.85 * free > held["engine_weights"] + 10e9, held
