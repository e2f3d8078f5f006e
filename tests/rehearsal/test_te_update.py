"""The update on Transformer Engine's own Python code, kernels in torch: equal to the local spec."""

import pytest

pytestmark = pytest.mark.usefixtures("transformer_engine")


@pytest.fixture
def results(results_of):
    return results_of("te_update.py")


def test_in_float32_both_specs_give_the_same_update(results):
    for kind in ("fp32", "moe"):
        te = results["moe_te" if kind == "moe" else "fp32_te"]
        assert te == pytest.approx(results["moe_local" if kind == "moe" else "fp32_local"], rel=2e-5)


def test_in_bfloat16_both_specs_agree_within_its_rounding(results):
    assert results["bf16_te"] == pytest.approx(results["bf16_local"], rel=5e-3)
    assert results["bf16_te"]["before"] == pytest.approx(results["fp32_te"]["before"], rel=1e-3)


def test_the_optimizer_is_fused_adam_and_has_a_state_before_its_first_step(results):
    assert results["optimizer"].startswith("transformer_engine")
    assert results["checkpoint_before_the_first_update"] == ["exp_avg", "exp_avg_sq"]


def test_experts_are_one_grouped_gemm_under_the_names_that_the_rules_know(results):
    assert results["grouped_experts"] == {
        "experts": "TEGroupedMLP",
        "names": [f"local_experts.{e}.linear_fc{n}.weight" for e in range(4) for n in (1, 2)],
    }


def test_weight_gradients_are_accumulated_in_float32_without_a_rounding_to_bfloat16(results):
    gradients = results["weight_gradients_in_float32"]
    assert gradients["dtype"] == "torch.float32"
    assert gradients["bfloat16_values"] < 0.1
