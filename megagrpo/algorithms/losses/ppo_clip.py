"""PPO's clipped surrogate with separate bounds, and the dual clip.

Source: PPO (arXiv 1707.06347, Eq. 7); separate bounds: DAPO clip-higher (arXiv 2503.14476, Eq. 10); dual
clip: Ye et al. (arXiv 1912.09729, dual-clip PPO).

Differences from the paper: a loss (to be minimised) instead of an objective; unreduced; ratios above exp(20)
are constant in value and keep their gradient, so that no 0 * inf appears.
"""

import torch
from torch import Tensor

from megagrpo.algorithms.losses.base import LossInputs, LossOutput, exp_log_ratio, register_loss
from megagrpo.algorithms.metrics import Metric, measure


@register_loss("ppo_clip", options={"dual_clip": 0.0})
def ppo_clip(inputs: LossInputs) -> LossOutput:
    """Compute -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token; r = exp(actor - old).

    With the option `dual_clip` c > 1, tokens with a negative advantage lose at most -c A; 0 turns it off.
    """
    ratio = exp_log_ratio(inputs.log_ratio())
    loss = clipped_surrogate(ratio, inputs)
    metrics = measure_clipping(ratio, inputs)
    if (bound := inputs.option("dual_clip")) > 0:
        dual_clipped = (inputs.advantages < 0) & (ratio.detach() > bound)
        loss = torch.where(dual_clipped, -bound * inputs.advantages, loss)
        metrics["clip_fraction_dual"] = measure("clip_fraction_dual", dual_clipped)
    return LossOutput(loss, metrics)


def clipped_surrogate(ratio: Tensor, inputs: LossInputs) -> Tensor:
    """Return -min(ratio A, clip(ratio) A) [T]; its gradient is exactly 0 where the clipped side is the
    smaller one.
    """
    clipped = ratio.clamp(1 - inputs.config.clip_low, 1 + inputs.config.clip_high)
    return torch.maximum(-ratio * inputs.advantages, -clipped * inputs.advantages)


def measure_clipping(ratio: Tensor, inputs: LossInputs) -> dict[str, Metric]:
    """Return the shares of tokens whose gradient the lower and the upper bound removed."""
    low = (inputs.advantages < 0) & (ratio < 1 - inputs.config.clip_low)
    high = (inputs.advantages > 0) & (ratio > 1 + inputs.config.clip_high)
    return {
        "clip_fraction_low": measure("clip_fraction_low", low),
        "clip_fraction_high": measure("clip_fraction_high", high),
    }
