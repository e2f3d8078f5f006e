"""RLOO: each reward against the mean of the others of its group.

Source: Ahmadian et al., "Back to Basics" (arXiv 2402.14740), REINFORCE leave-one-out; Kool et al. (2019).

Differences from the paper: computed as n / (n - 1) * (r - mean of all n), which is the same number.
"""

from torch import Tensor

from megagrpo.algorithms.advantages.base import AdvantageInputs, center, register_estimator


@register_estimator("rloo")
def rloo(inputs: AdvantageInputs) -> Tensor:
    """Compute r_i - mean of r_j over j != i within each group [N, G]."""
    members = inputs.valid.sum(1, keepdim=True).double()
    return center(inputs.rewards, inputs.valid) * members / (members - 1).clamp(min=1)
