"""SAPO: a smooth gate instead of a clip.

Source: Soft Adaptive Policy Optimization (arXiv 2511.20347).

Differences from the paper: none in the gate. With r = 1 the value is -(2 / tau) A, not -A, so the first
step's loss is 0 only where the two temperatures agree; its gradient there is that of REINFORCE for every tau.
"""

import torch

from megagrpo.algorithms.losses.base import LossInputs, LossOutput, exp_log_ratio, register_loss


@register_loss("sapo", options={"tau_positive": 1.0, "tau_negative": 1.05})
def sapo(inputs: LossInputs) -> LossOutput:
    """Compute -(4 / tau) sigmoid(tau (r - 1)) A per token; tau = tau_positive where A > 0, else
    tau_negative.
    """
    ratio = exp_log_ratio(inputs.log_ratio())
    positive, negative = (
        ratio.new_tensor(inputs.option("tau_positive")),
        ratio.new_tensor(inputs.option("tau_negative")),
    )
    tau = torch.where(inputs.advantages > 0, positive, negative)
    return LossOutput(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * inputs.advantages)
