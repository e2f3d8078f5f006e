"""CISPO: the importance weight is clipped, no token loses its gradient.

Source: MiniMax-M1 (arXiv 2506.13585), Section 3.1, Eq. 4 and 5.

Differences from the paper: the value is -w A instead of -w A log pi (same gradient), so that the first step
of centred advantages has loss 0. The paper sets no lower bound: `clip_low` of 1 or more does that. It does
not publish its upper bound.
"""

from megagrpo.algorithms.losses.base import (
    LossInputs,
    LossOutput,
    attach_gradient,
    exp_log_ratio,
    register_loss,
)
from megagrpo.algorithms.metrics import measure


@register_loss("cispo")
def cispo(inputs: LossInputs) -> LossOutput:
    """Compute a loss of value -w A and gradient -w A grad log pi, w = clip(actor / old, 1 - clip_low, 1 +
    clip_high), detached.
    """
    low, high = 1 - inputs.config.clip_low, 1 + inputs.config.clip_high
    ratio = exp_log_ratio(inputs.log_ratio().detach())
    loss = attach_gradient(-ratio.clamp(low, high) * inputs.advantages, inputs.actor_logprobs)
    trains = inputs.advantages != 0
    return LossOutput(
        loss,
        {
            "clip_fraction_low": measure("clip_fraction_low", trains & (ratio < low)),
            "clip_fraction_high": measure("clip_fraction_high", trains & (ratio > high)),
        },
    )
