"""REINFORCE: the plain policy gradient.

Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"
(1992).

Differences from the paper: the value is -A instead of -A log pi (same gradient), so that a batch of centred
advantages has loss 0.
"""

from megagrpo.algorithms.losses.base import LossInputs, LossOutput, attach_gradient, register_loss


@register_loss("policy_gradient", uses_old_logprobs=False)
def policy_gradient(inputs: LossInputs) -> LossOutput:
    """Compute a loss of value -A and gradient -A grad log pi(actor) per token; no ratio, no clipping."""
    return LossOutput(attach_gradient(-inputs.advantages, inputs.actor_logprobs))
