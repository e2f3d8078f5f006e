"""GSPO: the ratio of whole sequences, clipped as a whole.

Source: Group Sequence Policy Optimization (arXiv 2507.18071), the objective with the length-normalised ratio
s_i of Section 4.1 and the token form (GSPO-token) of Section 4.3.

Differences from the paper: the token form is used for both. With one advantage per completion its gradient is
the same: averaged over the |y_i| tokens, s_i A_i grad log pi(token) gives A_i grad s_i = A_i s_i (1/|y_i|)
sum_t grad log pi(token t). The sequence statistic is detached, so context-parallel ranks exchange one sum in
the forward and nothing in the backward. It equals the paper under aggregation `sequence_mean`.
"""

from megagrpo.algorithms.losses.base import (
    LossInputs,
    LossOutput,
    attach_gradient,
    exp_log_ratio,
    register_loss,
)
from megagrpo.algorithms.losses.ppo_clip import clipped_surrogate, measure_clipping


@register_loss("gspo", needs_whole_sequences=True)
def gspo(inputs: LossInputs) -> LossOutput:
    """Compute -min(s A, clip(s) A) per token, s = exp(mean over the sequence of log(actor / old))."""
    sequence_ratio = exp_log_ratio(inputs.sequence_mean(inputs.log_ratio()))
    ratio = attach_gradient(sequence_ratio, inputs.actor_logprobs)
    return LossOutput(clipped_surrogate(ratio, inputs), measure_clipping(ratio, inputs))
