"""How far the engine's log-probs are from the actor's: overall, by position in the completion, by age of
the policy.
"""

import torch
from torch import Tensor

from megagrpo.algorithms.kl import compute_k3
from megagrpo.algorithms.metrics import Metric, measure

# Bucket edges: a gap that grows with the position points at caches and rope; one that grows with the age, at
# staleness.
POSITION_EDGES = (0, 64, 256, 1024, 4096, 16384)
MAX_AGE = 3  # older tokens share one bucket
FRESH_GAP = "rollout_gap/age_0"  # mean over the tokens that the actor's own weights sampled


def measure_mismatch(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    positions: Tensor | None = None,
    policy_age: Tensor | None = None,
) -> dict[str, Metric]:
    """Measure the gap between actor and engine on the same tokens.

    Args:
        old_logprobs: [T] the actor's, before the update.
        rollout_logprobs: [T] the engine's.
        positions: [T] index of the token in its completion, from 0.
        policy_age: [T] publishes between the token's weight version and the actor's, from 0.

    Returns:
        `rollout_gap` (mean, max, `/position_FROM`, `/age_N`), `rollout_k3` (k3 estimate of KL(rollout ||
        old): the tokens were sampled by the engine), and both mean log-probs, from which `finalize_metrics`
        derives the perplexities. Every rank reports the same names, with count 0 where it has no such token.
    """
    old, rollout = old_logprobs.detach().double(), rollout_logprobs.detach().double()
    gap = (old - rollout).abs()
    metrics = {
        "rollout_gap": measure("rollout_gap", gap),
        "rollout_gap_max": measure("rollout_gap_max", gap),
        "rollout_k3": measure("rollout_k3", compute_k3(old - rollout)),
        "rollout_logprob": measure("rollout_logprob", rollout),
        "old_logprob": measure("old_logprob", old),
    }
    if positions is not None:
        edges = torch.tensor(POSITION_EDGES[1:], device=positions.device)
        bucket = torch.bucketize(positions, edges, right=True)
        for index, start in enumerate(POSITION_EDGES):
            metrics[f"rollout_gap/position_{start}"] = measure("rollout_gap", gap[bucket == index])
    if policy_age is not None:
        for age in range(MAX_AGE + 1):
            of_age = policy_age.clamp(max=MAX_AGE) == age
            metrics[f"rollout_gap/age_{age}"] = measure("rollout_gap", gap[of_age])
    return metrics
