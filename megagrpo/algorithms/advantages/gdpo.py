"""GDPO: several rewards, each standardised within its group before they are added.

Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization" (arXiv 2601.05242).

Differences from the paper: the batch-wise step divides by the standard deviation only; the mean it would
subtract is 0, because every group's advantages sum to 0, and not subtracting it keeps degenerate groups at
exactly 0.
"""

import torch
from torch import Tensor

from megagrpo.algorithms.advantages.base import (
    ROUNDING,
    AdvantageInputs,
    center,
    find_equal_rewards,
    normalize,
    register_estimator,
)


@register_estimator("gdpo", needs_parts=True)
def gdpo(inputs: AdvantageInputs) -> Tensor:
    """Compute sum_k weight_k * (r_k - mean(r_k)) / std(r_k) within each group, divided by its std over the
    batch [N, G].
    """
    # compute_advantages has checked
    assert inputs.reward_parts is not None and inputs.part_weights is not None
    total, size = torch.zeros_like(inputs.rewards), torch.zeros_like(inputs.rewards)
    for part, weight in zip(inputs.reward_parts.unbind(2), inputs.part_weights, strict=True):
        standardised = normalize(center(part, inputs.valid), inputs.valid, inputs.config)
        summand = weight * torch.where(find_equal_rewards(part, inputs.valid)[:, None], 0.0, standardised)
        total, size = total + summand, size + summand.abs()
    total = torch.where(total.abs() <= ROUNDING * size, 0.0, total)  # parts that cancel leave rounding alone
    return normalize(total, inputs.valid, inputs.config, (0, 1))
