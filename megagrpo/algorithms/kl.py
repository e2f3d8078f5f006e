"""KL estimators from the log-probs of sampled tokens, their use in loss and reward, and the adaptive
coefficient.

Source: Schulman, "Approximating KL divergence" (2020) for k1, k2 and k3; k3 in the loss: DeepSeekMath (arXiv
2402.03300, Eq. 4); adaptive coefficient: Ziegler et al. (arXiv 1909.08593).

Differences from the papers: near u = 0 k3 uses its Taylor series (exp(u) - u - 1 cancels there in float32)
and above `linear_above` it goes on along its tangent: it neither overflows nor loses its gradient where the
penalty is needed most.

As a loss, the gradient of k1 has expectation 0 (it only adds noise); k2's is that of KL(actor || reference),
k3's that of KL(reference || actor), each on policy; with `add_score_term` k1 and k3 have that of
KL(actor || reference). `exact` is KL(actor || reference) over the full
vocabulary, computed by `ops`.
"""

import torch
from torch import Tensor

from megagrpo.config.algorithm_section import KLConfig

# The series' first left-out term is u^5 / 120: relative to u^2 / 2 it is below 2e-8 here, less than float32
# rounding.
_SERIES_BELOW = 1e-2


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, linear_above: float = 10.0) -> Tensor:
    """Estimate KL(pi || reference) per token from tokens sampled by pi, u = log reference - log pi.

    Args:
        logprobs: [T] log-probs under pi; carries the gradient.
        ref_logprobs: [T] log-probs under the reference.
        estimator: `k1` -u; `k2` u^2 / 2; `k3` exp(u) - u - 1; `abs` |u|.
        linear_above: u from which k3 continues linearly.

    Returns:
        [T] estimates; all but k1 are non-negative and all are 0 at equality.
    """
    u = ref_logprobs.detach() - logprobs
    if estimator == "k1":
        return -u
    if estimator == "k2":
        return u * u / 2
    if estimator == "abs":
        return u.abs()
    if estimator == "k3":
        return compute_k3(u, linear_above)
    raise ValueError(f"no sampled KL estimator is called {estimator!r}: k1, k2, k3 or abs")


def add_score_term(kl: Tensor, logprobs: Tensor) -> Tensor:
    """Return `kl` [T] with the gradient of kl * logprobs added: that of the expectation over tokens that pi
    samples, d E_pi[kl] = E_pi[d kl + kl d log pi].

    Source: "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv 2506.09477). The part of
    this token: what it does to the divergence of later tokens is left out, as in the other KL terms.
    """
    return kl + kl.detach() * (logprobs - logprobs.detach())


def compute_k3(u: Tensor, linear_above: float = 10.0) -> Tensor:
    """Return exp(u) - u - 1 [T], continued along its tangent above `linear_above`."""
    bounded = u.clamp(max=linear_above)
    series = bounded * bounded / 2 * (1 + bounded / 3 * (1 + bounded / 4))
    exponential = torch.expm1(bounded)
    k3 = torch.where(bounded.abs() < _SERIES_BELOW, series, exponential - bounded)
    return k3 + exponential.detach() * (u - bounded)


def compute_kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    config: KLConfig,
    coef: float,
) -> Tensor:
    """Return what KL takes from each completion's reward: coef * sum over its tokens of the estimate
    [num_sequences] float64.

    Source: InstructGPT (arXiv 2203.02155, Eq. 2), with the log-ratio generalised to the configured estimator.

    Args:
        logprobs: [T] old log-probs (the actor's, before the update), any tokens of a sequence in any order.
        ref_logprobs: [T] log-probs under the reference.
        sequence_ids: [T] int64.
        num_sequences: B.
        config: estimator and its bound.
        coef: the coefficient in force (adaptive or fixed).
    """
    penalty = compute_token_penalty(logprobs, ref_logprobs, config, coef)
    return penalty.new_zeros(num_sequences).index_add(0, sequence_ids, penalty)


def compute_token_penalty(logprobs: Tensor, ref_logprobs: Tensor, config: KLConfig, coef: float) -> Tensor:
    """Return what KL takes from the reward at each token: coef * the estimate [T] float64."""
    kl = estimate_kl(logprobs.detach().double(), ref_logprobs.double(), config.estimator, config.linear_above)
    return coef * kl


def update_kl_coef(coef: float, measured_kl: float, config: KLConfig) -> float:
    """Move an adaptive coefficient towards its target; a fixed one is returned as it is.

    coef * (1 + gain * e), e = clip(measured / target - 1, -0.2, 0.2). `measured_kl` is the step's global mean
    per token.
    """
    if config.adaptive_target is None:
        return coef
    error = min(max(measured_kl / config.adaptive_target - 1, -0.2), 0.2)
    return coef * (1 + config.adaptive_gain * error)
