"""Rollout correction: importance weights, masks and rejections for tokens that the engine sampled from
another policy than the actor's.

The engine's numerics differ from the trainer's, and its weights may be older. ratio_t = exp(old_logprobs -
rollout_logprobs), the actor before the update over the engine. Everything here is known before the first
micro-batch of the update and carries no gradient.

Sources: truncated importance sampling: Ionides (2008), and Yao et al., "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training" (2025); band masking: IcePop, in Ring-1T (arXiv 2510.18855); sequence
rejection and veto: the rollout correction that verl documents.

Differences from the papers: what is masked leaves numerator, denominator and (whole sequences) the group
statistics alike; IcePop keeps masked tokens in its denominator. Band and weight are apart: IcePop as
published is `importance: token`, `band_low: 0.5`, `band_high: 5`, `importance_cap: 5`. Products are formed in
log space in float64, so no bound is ever passed by an overflow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megagrpo.algorithms.algorithm_checks import check_logprobs
from megagrpo.algorithms.diagnostics import measure_mismatch
from megagrpo.algorithms.metrics import Metric, measure
from megagrpo.config.algorithm_section import CorrectionConfig


@dataclass(frozen=True)
class CorrectionResult:
    """The correction's weights and masks for T tokens of B sequences."""

    weights: Tensor  # [T] detached importance weights of the policy loss, in the log-probs' dtype
    # [T] bool; False: the token leaves the loss mask (numerator, denominator, sequence statistics)
    keep: Tensor
    rejected: Tensor  # [B] bool; True: the completion is invalid, for the group statistics too
    diagnostics: Mapping[str, Metric] = field(default_factory=dict)


def compute_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
    *,
    sequence_sum: Callable[[Tensor], Tensor] | None = None,
    positions: Tensor | None = None,
    policy_age: Tensor | None = None,
) -> CorrectionResult:
    """Compute weights, masks and diagnostics of the gap between actor and engine.

    Args:
        old_logprobs: [T] the actor's, before the update.
        rollout_logprobs: [T] the engine's, of the same tokens at the same temperature.
        sequence_ids: [T] int64, 0 <= id < num_sequences.
        num_sequences: B.
        config: what to do; with everything off the weights are 1, nothing is masked, and the diagnostics are
            still reported.
        sequence_sum: [T] -> [B] sum over each sequence's tokens; with context parallelism one that
            all-reduces over its group.
        positions: [T] index of the token in its completion, for the diagnostics by position.
        policy_age: [T] publishes between the token's weight version and the actor's, for the diagnostics by
            age.

    Raises:
        UserError: log-probs that are NaN, positive or of different lengths.
    """
    check_logprobs("old_logprobs", old_logprobs, sequence_ids.numel(), sequence_ids)
    check_logprobs("rollout_logprobs", rollout_logprobs, sequence_ids.numel(), sequence_ids)
    log_ratio = old_logprobs.detach().double() - rollout_logprobs.detach().double()

    def sum_local_tokens(values: Tensor) -> Tensor:
        return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)

    sum_sequences = sequence_sum or sum_local_tokens
    in_band = _within(log_ratio, config.band_low, config.band_high)
    rejected = _reject_sequences(log_ratio, sum_sequences, config)
    keep = in_band & ~rejected[sequence_ids]
    weights = _compute_weights(log_ratio, in_band, sum_sequences, sequence_ids, config).to(old_logprobs.dtype)
    diagnostics = {
        **measure_mismatch(old_logprobs, rollout_logprobs, positions, policy_age),
        "correction_weight": measure("correction_weight", weights[keep]),
        "correction_weight_squared": measure("correction_weight_squared", weights[keep].double().square()),
        "correction_weight_max": measure("correction_weight_max", weights[keep]),
        "correction_masked_fraction": measure("correction_masked_fraction", ~keep),
        "correction_rejected_fraction": measure("correction_rejected_fraction", rejected),
    }
    return CorrectionResult(weights, keep, rejected, diagnostics)


def _within(log_ratio: Tensor, low: float, high: float | None) -> Tensor:
    inside = torch.ones_like(log_ratio, dtype=torch.bool)
    if low > 0:
        inside &= log_ratio >= _log(low, log_ratio)
    if high is not None:
        inside &= log_ratio <= _log(high, log_ratio)
    return inside


def _reject_sequences(
    log_ratio: Tensor, sum_sequences: Callable[[Tensor], Tensor], config: CorrectionConfig
) -> Tensor:
    lengths = sum_sequences(torch.ones_like(log_ratio))
    rejected = torch.zeros_like(lengths, dtype=torch.bool)
    if config.reject != "none":
        total = sum_sequences(log_ratio)
        # no tokens: a ratio of 1
        judged = total / lengths.clamp(min=1) if config.reject == "geometric" else total
        rejected |= ~_within(judged, config.reject_low, config.reject_high)
    if config.veto_below > 0:
        rejected |= sum_sequences((log_ratio < _log(config.veto_below, log_ratio)).double()) > 0
    return rejected


def _compute_weights(
    log_ratio: Tensor,
    in_band: Tensor,
    sum_sequences: Callable[[Tensor], Tensor],
    sequence_ids: Tensor,
    config: CorrectionConfig,
) -> Tensor:
    if config.importance == "none":
        return torch.ones_like(log_ratio)
    if config.importance == "sequence":
        log_ratio = sum_sequences(torch.where(in_band, log_ratio, 0.0))[sequence_ids]
    return torch.exp(torch.minimum(log_ratio, _log(config.importance_cap, log_ratio)))


def _log(bound: float, like: Tensor) -> Tensor:
    return torch.log(like.new_tensor(bound))
