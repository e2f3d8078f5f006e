"""`precision.emulate` reaches every linear layer of the decoder, forward and backward, and nothing else."""

import pytest

RECIPES = ["fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"]
# of 2 layers: qkv, proj, fc1, fc2; with 4 experts: qkv, proj, and fc1, fc2 of each
LINEARS = {"dense": 2 * 4, "experts": 2 * (2 + 4 * 2)}


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_linear_of_the_decoder_rounds_and_the_output_layer_does_not(results_of, kind, recipe):
    """Products of operands with three mantissa bits (two for gradients) differ by per cents, in all recipes;
    a recipe that was ignored would give float32's values to the last digits.
    """
    results = results_of("emulation.py")
    exact, rounded = results[f"{kind} fp32"], results[f"{kind} {recipe}"]
    assert rounded["changed"] == LINEARS[kind] and rounded["left"] == ["output_layer"]
    for value in ("before", "grad_norm", "after"):
        difference = abs(rounded[value] / exact[value] - 1)
        assert 1e-7 < difference < 0.2, (value, exact, rounded)


def test_a_column_parallel_linear_communicates_as_megatrons_own(results_of):
    told = results_of("emulation.py")["communication"]
    assert told["asked"] == [
        ["gather_from_sequence_parallel_region", "tp"],
        ["copy_to_tensor_model_parallel_region", "tp"],
    ]
    assert told["close"] == [True, True]
