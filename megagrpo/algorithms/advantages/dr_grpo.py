"""Dr. GRPO: rewards centred within their group, without the division by the standard deviation.

Source: "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv 2503.20783), Section 3.2.

Differences from the paper: none. Its other half, the constant denominator, is `aggregation: constant`.
"""

from torch import Tensor

from megagrpo.algorithms.advantages.base import AdvantageInputs, center, register_estimator


@register_estimator("dr_grpo")
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """Compute r - mean(r) within each group [N, G]."""
    return center(inputs.rewards, inputs.valid)
