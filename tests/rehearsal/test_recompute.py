"""Each choice of `update.recompute` keeps less for the backward pass, and gives the same gradients."""

import pytest

CHOICES = {
    "local": ["full", "layernorm", "mlp"],
    "te dense": ["full", "mlp"],
    "te experts": ["full", "moe_act", "layernorm"],
}


@pytest.mark.parametrize(("spec", "choice"), [(spec, one) for spec in CHOICES for one in CHOICES[spec]])
def test_a_choice_keeps_less_and_changes_no_gradient(results_of, transformer_engine, spec, choice):
    results = results_of("recompute.py")
    plain, recomputed = results[f"{spec} none"], results[f"{spec} {choice}"]
    assert recomputed["bytes"] < 0.97 * plain["bytes"], (plain, recomputed)
    # the same operations on the same values: equal, but for the order of sums in float32
    assert recomputed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_core_attention_is_computed_twice_where_that_is_asked_for(results_of, transformer_engine):
    """On a CPU it keeps no scores that this would save; with the plain attention of a GPU it does."""
    results = results_of("recompute.py")
    plain, recomputed = results["local none"], results["local core_attn"]
    assert recomputed["attention_calls"] == 2 * plain["attention_calls"] > 0
    assert recomputed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
