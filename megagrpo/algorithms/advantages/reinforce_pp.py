"""REINFORCE++: rewards standardised over the whole batch, with or without a group baseline.

Source: "REINFORCE++" (arXiv 2501.03262): the global advantage normalisation, and its variant with a group
    baseline.

Differences from the paper: the statistics are over completions, not over tokens (a long completion counts
    once); the per-token KL of the
paper's reward is `kl: {placement: reward, estimator: k1}`, summed over the completion. Without the group
baseline a group of equal
rewards is not degenerate: it is compared with the batch, and only a batch of equal rewards gives 0.
"""

import torch
from torch import Tensor

from megagrpo.algorithms.advantages.base import (
    AdvantageInputs,
    center,
    find_equal_rewards,
    normalize,
    register_estimator,
)

BATCH = (0, 1)


@register_estimator("reinforce_pp", group_baseline=False)
def reinforce_pp(inputs: AdvantageInputs) -> Tensor:
    """Compute (r - mean(r)) / std(r) over all valid completions of the batch [N, G]."""
    if bool(find_equal_rewards(inputs.rewards.reshape(1, -1), inputs.valid.reshape(1, -1))):
        return torch.zeros_like(inputs.rewards)
    return normalize(center(inputs.rewards, inputs.valid, BATCH), inputs.valid, inputs.config, BATCH)


@register_estimator("reinforce_pp_baseline")
def reinforce_pp_baseline(inputs: AdvantageInputs) -> Tensor:
    """Compute r - mean(r) within each group, divided by the standard deviation of these over the batch [N,
    G].

    Their mean over the batch is 0, since every group's is.
    """
    return normalize(center(inputs.rewards, inputs.valid), inputs.valid, inputs.config, BATCH)
