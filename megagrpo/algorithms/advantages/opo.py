"""OPO: the baseline of least gradient variance, a length-weighted mean.

Source: "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585), the practical baseline for sequence
generation (squared gradient norm proportional to the length).

Differences from the paper: none in the baseline. The paper trains strictly on policy:
    `update.mini_batches_per_step: 1`.
"""

import torch
from torch import Tensor

from megagrpo.algorithms.advantages.base import AdvantageInputs, register_estimator


@register_estimator("opo", needs_lengths=True)
def opo(inputs: AdvantageInputs) -> Tensor:
    """Compute r - sum(length * r) / sum(length) within each group [N, G]."""
    assert inputs.lengths is not None  # compute_advantages has checked
    lengths = torch.where(inputs.valid, inputs.lengths, 0.0)
    total = lengths.sum(1, keepdim=True)
    baseline = (lengths * inputs.rewards).sum(1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return torch.where(inputs.valid, inputs.rewards - baseline, 0.0)
