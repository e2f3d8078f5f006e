"""KL estimators, their behaviour at the extremes, the reward penalty and the adaptive coefficient."""

import math

import pytest
import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.kl import add_score_term, compute_k3, compute_kl_penalty, estimate_kl, update_kl_coef
from megagrpo.algorithms.losses import LossInputs
from megagrpo.config.algorithm_section import AlgorithmConfig, KLConfig

FORMULAS = {"k1": lambda u: -u, "k2": lambda u: u * u / 2, "k3": lambda u: math.exp(u) - u - 1, "abs": abs}


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("u", [-8.0, -0.7, -1e-3, 0.0, 1e-3, 0.02, 0.7, 8.0])
def test_estimator_equals_its_formula_in_float64(estimator, u):
    got = estimate_kl(
        torch.tensor([-1.0 - u], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64), estimator
    ).item()
    assert got == pytest.approx(FORMULAS[estimator](u), rel=1e-7, abs=1e-15)


@pytest.mark.parametrize("u", [1e-6, -1e-5, 1e-4, -1e-3, 9e-3, 1.1e-2, 0.1])
def test_k3_near_equality_keeps_its_digits_in_float32(u):
    """exp(u) - u - 1 in float32 is rounding noise here; the reference is the series, which float64 sums
    exactly enough.
    """
    exact = sum(u**n / math.factorial(n) for n in range(2, 12))
    # above the series' range expm1(u) - u loses the digits that u^2/2 is smaller than u
    tolerance = 2e-7 if abs(u) < 1e-2 else 3e-5
    assert compute_k3(torch.tensor([u])).item() == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_goes_on_along_its_tangent_and_never_loses_its_gradient(dtype):
    """A clamp would make the gradient 0 exactly where the actor has left the reference furthest."""
    actor = torch.tensor([-12.0, -50.0, -5000.0], dtype=dtype, requires_grad=True)
    kl = estimate_kl(actor, torch.zeros(3, dtype=dtype), "k3", linear_above=10.0)
    kl.sum().backward()
    slope = math.exp(10) - 1
    expected = [math.exp(10) - 11 + slope * (u - 10) for u in (12.0, 50.0, 5000.0)]
    assert kl.tolist() == pytest.approx(expected, rel=1e-6)
    assert actor.grad.tolist() == pytest.approx([-slope] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("u", "expected"), [(-2.0, 1 - math.exp(-2.0)), (-1e-3, 1 - math.exp(-1e-3)), (3.0, 1 - math.exp(3.0))]
)
def test_k3_gradient_is_one_minus_the_ratio(u, expected):
    actor = torch.tensor([-1.0 - u], dtype=torch.float64, requires_grad=True)
    estimate_kl(actor, torch.tensor([-1.0]).double(), "k3").backward()
    assert actor.grad.item() == pytest.approx(expected, rel=1e-7)


def test_k3_is_unbiased_where_the_naive_log_ratio_is_noisy():
    """Expectations over a full distribution: k1 and k3 both give the exact KL(pi || reference), abs and k2
    do not.
    """
    policy, reference = (
        torch.tensor([0.7, 0.2, 0.1]).double().log(),
        torch.tensor([0.3, 0.3, 0.4]).double().log(),
    )
    exact = (policy.exp() * (policy - reference)).sum().item()
    means = {name: (policy.exp() * estimate_kl(policy, reference, name)).sum().item() for name in FORMULAS}
    assert means["k1"] == pytest.approx(exact) and means["k3"] == pytest.approx(exact)
    assert means["k2"] != pytest.approx(exact, rel=0.01) and means["abs"] != pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_its_score_term_an_estimator_has_the_gradient_of_the_divergence(estimator):
    """The expectation over all tokens, weighted by a constant probability as sampling does, against autograd
    through sum p (ln p - ln q). Without the term k1's is 0 and k3's that of the other direction.
    """
    logits = torch.tensor([0.3, -1.0, 1.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    sampled = logprobs.exp().detach()
    kl = estimate_kl(logprobs, reference, estimator)
    (plain,) = torch.autograd.grad((sampled * kl).sum(), logits, retain_graph=True)
    with_term = add_score_term(kl, logprobs)
    (ours,) = torch.autograd.grad((sampled * with_term).sum(), logits)
    assert torch.equal(with_term, kl)
    assert torch.allclose(ours, exact, rtol=1e-10) and not torch.allclose(plain, exact, rtol=0.1)


def test_the_score_term_is_an_option_of_the_loss():
    def gradient(**options):
        actor = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        config = AlgorithmConfig(kl={"coef": 0.5, "estimator": "k2", **options})
        inputs = LossInputs(
            actor, actor.detach(), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1, config,
            ref_logprobs=torch.tensor([-2.0, -2.5], dtype=torch.float64),
        )  # fmt: skip
        Algorithm(config, 4, 8).token_loss(inputs).loss.sum().backward()
        return actor.grad.tolist()

    # k2 = u^2 / 2 with u = ref - actor: -u, and u^2 / 2 more
    assert gradient() == pytest.approx([0.5, 0.25])
    assert gradient(score_term=True) == pytest.approx([0.5 * 1.5, 0.5 * (0.5 + 0.125)])


def test_reference_gets_no_gradient():
    reference = torch.tensor([-1.0], requires_grad=True)
    estimate_kl(torch.tensor([-2.0], requires_grad=True), reference, "k3").sum().backward()
    assert reference.grad is None


def test_unknown_estimator_raises():
    with pytest.raises(ValueError, match="k4"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_reward_penalty_is_the_sum_over_the_completion():
    old, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    config = KLConfig(coef=0.5, estimator="k1", placement="reward")
    penalty = compute_kl_penalty(old, reference, torch.tensor([0, 0, 2]), 3, config, coef=0.2)
    assert penalty.tolist() == pytest.approx([0.2 * (0.5 - 1.0), 0.0, 0.0])


def test_adaptive_coefficient_moves_towards_its_target():
    config = KLConfig(coef=0.1, adaptive_target=0.05, adaptive_gain=0.1)
    assert update_kl_coef(0.1, 0.05, config) == pytest.approx(0.1)
    assert update_kl_coef(0.1, 0.055, config) == pytest.approx(0.1 * 1.01)  # error 0.1, inside the clip
    assert update_kl_coef(0.1, 5.0, config) == pytest.approx(0.1 * 1.02)  # error clipped at 0.2
    assert update_kl_coef(0.1, 0.0, config) == pytest.approx(0.1 * 0.98)


def test_fixed_coefficient_stays():
    assert update_kl_coef(0.1, 9.0, KLConfig(coef=0.1)) == 0.1


def test_k3_is_finite_up_to_the_largest_bound_that_is_allowed():
    """exp(100) is infinite in float32 and infinity * 0 NaN; exp(20) keeps every sum over a batch finite."""
    with pytest.raises(ValueError, match="less than or equal to 20"):
        KLConfig(linear_above=20.5)
    bound = KLConfig(linear_above=20.0).linear_above
    actor = torch.tensor([-1e4, -30.0, -19.0], requires_grad=True)
    kl = estimate_kl(actor, torch.zeros(3), "k3", bound)
    kl.sum().backward()
    assert torch.isfinite(kl).all() and torch.isfinite(actor.grad).all() and (actor.grad < -1e8).all()


@pytest.mark.parametrize(
    "values",
    [
        {"estimator": "exact", "placement": "reward"},
        {"adaptive_target": 0.1},
        {"coef": 0.1, "score_term": True, "placement": "reward"},
    ],
)
def test_contradictory_settings_are_refused(values):
    with pytest.raises(ValueError):
        KLConfig(**values)
