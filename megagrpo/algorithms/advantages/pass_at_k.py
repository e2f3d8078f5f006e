"""Pass@k training: the expected advantage over all k-subsets of a group, in closed form.

Source: "Pass@k Training for Adaptively Balancing Exploration and Exploitation" (arXiv 2508.10751), the
analytical derivation.

Differences from the paper: groups may be ragged (n is the number of valid members; n < k gives 0). Where
every k-subset succeeds, or none does, the standard deviation is 0 and so are the advantages. The rewards are
read as success or failure.
"""

from math import comb, sqrt

import torch
from torch import Tensor

from megagrpo.algorithms.advantages.base import AdvantageInputs, register_estimator


def compute_pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, Eq.
    1).

    Args:
        n: samples drawn, at least k.
        c: successful ones among them.
        k: samples of which one must succeed, at least 1.
    """
    return 1 - comb(n - c, k) / comb(n, k)


@register_estimator("pass_at_k", options={"k": 4, "success_above": 0.5})
def pass_at_k(inputs: AdvantageInputs) -> Tensor:
    """Compute the mean, over the k-subsets that hold completion i, of the subset's standardised success [N,
    G].

    With n members, c of them successful, and a subset successful where any member is: mean = 1 - C(n-c, k) /
    C(n, k), std = sqrt(mean * (1 - mean)); a success gets (1 - mean) / std, a failure (1 - C(n-c-1, k-1) /
    C(n-1, k-1) - mean) / std.
    """
    k = int(inputs.options["k"])
    success = inputs.valid & (inputs.rewards > inputs.options["success_above"])
    advantages = torch.zeros_like(inputs.rewards)
    members, successes = inputs.valid.sum(1).tolist(), success.sum(1).tolist()
    for row, (n, c) in enumerate(zip(members, successes, strict=True)):
        if n < k:
            continue
        mean = compute_pass_at_k(n, c, k)
        std = sqrt(mean * (1 - mean))
        if std == 0:
            continue
        failure = (1 - comb(n - c - 1, k - 1) / comb(n - 1, k - 1) - mean) / std
        advantages[row].fill_(failure).masked_fill_(success[row], (1 - mean) / std)
    return torch.where(inputs.valid, advantages, 0.0)
