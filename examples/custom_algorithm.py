"""Add a token loss of your own, and see it train a toy batch.

    python examples/custom_algorithm.py

A loss is one function: per-token inputs in, one unreduced value per token out. A configuration names it by
    its place; the trainer, the
aggregation modes, the KL and entropy terms and every parallel layout then work with it as they are:

    algorithm:
      loss: examples/custom_algorithm.py:power_clip     # FILE.py:function, or package.module:function
      loss_options: {power: 0.5}

An advantage estimator is added the same way, with `megagrpo.algorithms.advantages.register_estimator` and
`algorithm.advantages`.
"""

import torch

from megagrpo.algorithms.aggregation import aggregate_loss
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.losses import LossInputs, LossOutput, exp_log_ratio, register_loss
from megagrpo.algorithms.metrics import declare_metric, finalize_metrics, measure
from megagrpo.config.algorithm_section import AlgorithmConfig

declare_metric("power_ratio", "mean", "actor / old ratio to the power of power_clip")


@register_loss("power_clip", options={"power": 0.5})
def power_clip(inputs: LossInputs) -> LossOutput:
    """PPO's clip on a flattened ratio, r^power: the further the actor has moved, the less it is trusted. At r
    = 1 the division by `power` makes the gradient that of REINFORCE.
    """
    power = inputs.option("power")
    ratio = exp_log_ratio(power * inputs.log_ratio())
    clipped = ratio.clamp(1 - inputs.config.clip_low, 1 + inputs.config.clip_high)
    loss = torch.maximum(-ratio * inputs.advantages, -clipped * inputs.advantages) / power
    return LossOutput(loss, {"power_ratio": measure("power_ratio", ratio)})


def main() -> None:
    """Raise the probability of the rewarded one of 5 tokens: 4 completions of 3 tokens, 30 updates."""
    config = AlgorithmConfig(loss="power_clip", loss_options={"power": 0.5}, aggregation="token_mean")
    algorithm = Algorithm(config, completions_per_prompt=4, max_new_tokens=3)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[2, 0, 2], [1, 4, 0], [2, 2, 3], [0, 1, 1]])  # [G, L] sampled tokens
    rewards = (tokens == 2).float().mean(1, keepdim=True).T  # [N = 1, G]
    advantages = (
        algorithm.advantages(rewards, torch.ones_like(rewards, dtype=torch.bool)).advantages.flatten().float()
    )

    # the "model": one distribution for every position
    logits = (0.1 * torch.randn(5, generator=generator)).requires_grad_()
    sequence_ids = torch.arange(4).repeat_interleave(3)
    weights = algorithm.token_weights(torch.full((4,), 3), torch.zeros(4, dtype=torch.int64))[sequence_ids]
    old = torch.log_softmax(logits, 0)[tokens.flatten()].detach()
    before = torch.softmax(logits, 0)[2].item()
    for _ in range(30):
        actor = torch.log_softmax(logits, 0)[tokens.flatten()]
        output = algorithm.token_loss(
            LossInputs(actor, old, advantages[sequence_ids], sequence_ids, 4, config)
        )
        loss, metrics = aggregate_loss(output, weights)
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.2 * gradient).detach().requires_grad_()
    print(f"probability of the rewarded token: {before:.3f} -> {torch.softmax(logits, 0)[2].item():.3f}")
    for name, value in finalize_metrics(metrics).items():
        print(f"{name:>12} {value:.4f}")


if __name__ == "__main__":
    main()
