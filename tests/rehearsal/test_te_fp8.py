"""FP8 updates on Transformer Engine's own Python code: token counts are those that its asserts allow."""

import pytest

pytestmark = pytest.mark.usefixtures("transformer_engine")
RECIPES = ["fp8_delayed", "fp8_tensorwise", "fp8_blockwise"]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.distributed)], ids=["tp1", "tp2_sp"])
def results(request, results_of):
    return results_of("te_fp8.py", ranks=request.param)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_at_our_alignment_runs_and_is_near_bfloat16(results, recipe):
    """Casts to 3 and 2 bits of mantissa, with one scale a tensor or block: a few per cent."""
    exact, found = results["bf16 aligned"], results[f"{recipe} aligned"]
    assert "error" not in found, found
    assert found["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert found["grad_norm"] != exact["grad_norm"], "nothing was computed in FP8"


@pytest.mark.distributed
def test_counts_that_are_aligned_for_all_ranks_together_are_refused(results_of):
    """What a rank holds counts: 16 tokens on two ranks are 8 each, and blocks of 128 are cut."""
    results = results_of("te_fp8.py", ranks=2)
    assert "divisible by 8" in results["fp8_delayed misaligned"]["error"]
    assert "All-gather requires quantizable tensor" in results["fp8_blockwise misaligned"]["error"]
