"""GRPO: rewards standardised within their group.

Source: DeepSeekMath (arXiv 2402.03300), Section 4.1.2 (outcome supervision).

Differences from the paper: it leaves open which standard deviation it means (`advantage_std` chooses) and has
no floor under it (`advantage_std_floor`, `advantage_std_epsilon`).
"""

from torch import Tensor

from megagrpo.algorithms.advantages.base import AdvantageInputs, center, normalize, register_estimator


@register_estimator("grpo")
def grpo(inputs: AdvantageInputs) -> Tensor:
    """Compute (r - mean(r)) / std(r) within each group [N, G]."""
    return normalize(center(inputs.rewards, inputs.valid), inputs.valid, inputs.config)
