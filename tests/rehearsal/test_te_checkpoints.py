"""Checkpoints cross between Transformer Engine's layers and the local ones, with optimizer and FP8 state."""

import pytest

pytestmark = pytest.mark.usefixtures("transformer_engine")
CROSSINGS = [
    "dense_te_to_local",
    "dense_local_to_te",
    "moe_te_to_local",
    "moe_local_to_te",
    "te_to_te",
    "fp8_to_fp8",
    "fp8_to_bf16_local",
    "bf16_local_to_fp8",
]


@pytest.fixture
def results(results_of):
    return results_of("te_checkpoints.py")


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_every_tensor_arrives_bit_equal_and_training_goes_on(results, crossing):
    assert results[crossing].get("different") == [], results[crossing]
    assert results[crossing]["tensors"] >= 76


def test_the_scales_of_delayed_fp8_survive_a_resume(results):
    written, read = results["fp8_history_is_kept"]
    assert written == read
    assert written[0] != 1.0, "no scale was ever set, so nothing was compared"
