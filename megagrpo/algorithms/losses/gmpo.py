"""GMPO: the geometric mean of clipped token ratios.

Source: Geometric-Mean Policy Optimization (arXiv 2507.20673).

Differences from the paper: none in value or gradient under aggregation `sequence_mean`. The geometric mean
g_i is detached and each unclipped token carries g_i A grad log pi: averaged over the |o_i| tokens that is A
grad g_i. `clip_low` and `clip_high` bound the LOG ratio here, as in the paper: 0.4 and 0.4 are its (e^-0.4,
e^0.4).
"""

import torch

from megagrpo.algorithms.losses.base import (
    LossInputs,
    LossOutput,
    attach_gradient,
    exp_log_ratio,
    register_loss,
)
from megagrpo.algorithms.metrics import measure


@register_loss("gmpo", needs_whole_sequences=True)
def gmpo(inputs: LossInputs) -> LossOutput:
    """Compute -g A per token; g = exp(mean of the sequence's log ratios, each clipped on the side where A
    would gain).
    """
    log_ratio = inputs.log_ratio().detach()
    low = (inputs.advantages < 0) & (log_ratio < -inputs.config.clip_low)
    high = (inputs.advantages > 0) & (log_ratio > inputs.config.clip_high)
    clipped = torch.where(high, inputs.config.clip_high, torch.where(low, -inputs.config.clip_low, log_ratio))
    value = -exp_log_ratio(inputs.sequence_mean(clipped)) * inputs.advantages
    loss = torch.where(low | high, value, attach_gradient(value, inputs.actor_logprobs))
    return LossOutput(
        loss,
        {
            "clip_fraction_low": measure("clip_fraction_low", low),
            "clip_fraction_high": measure("clip_fraction_high", high),
        },
    )
