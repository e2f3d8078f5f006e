"""Log-probs and entropy of an output layer without its logits: four GEMMs, one MAX, one SUM, any loss.

The forward keeps the hidden states and one normaliser a row; the backward recomputes the logits tile by tile.
Memory beyond inputs and gradients is a few tiles, whatever T, and rows outside the loss mask never enter.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.ops.logit_gradient import LogitGradient, recompute_gradients
from megagrpo.ops.logit_tiles import LogitTiles, compute_row_statistics
from megagrpo.ops.vocab_shard import VocabShard, check_inputs


@dataclass(frozen=True)
class LinearLogprobs:
    """Result of `linear_logprobs`.

    Attributes:
        logprobs: [T] natural log-prob of each target, float32 (float64 for float64 inputs), never positive.
        entropy: [T] entropy in nats of the same distribution, None where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    compute_entropy: bool = False,
    reduce_hidden_grad: bool = True,
    accumulate_main_grad: bool = True,
) -> LinearLogprobs:
    """Log softmax(hidden @ weight.T / temperature)[target], with its entropy, differentiable in hidden and
    weight.

    Collective over `group`: one MAX and one SUM all-reduce in the forward, and one SUM of dL/dhidden in the
    backward where `reduce_hidden_grad`; none where T is 0 (every rank of the group has the same rows).

    Args:
        hidden: [T, H] float; only the rows that take part in the loss. The same on every rank of the group.
        weight: [Vp, H] of the same type; rank r of the group holds rows r * Vp .. (r + 1) * Vp of the padded
            vocabulary.
        targets: [T] int64 global token ids.
        vocab_size: the true V; padded columns beyond it never take part.
        temperature: scalar or [T]; the logits are divided by it once.
        group: tensor-parallel group, None for one rank.
        compute_entropy: also return the entropy.
        reduce_hidden_grad: all-reduce dL/dhidden over the group; False where a sequence-parallel gather
            reduce-scatters it.
        accumulate_main_grad: add the weight's gradient in float32 to `weight.main_grad` where it has one.

    Returns:
        Log-probs and entropy of the rows.

    Raises:
        UserError: shapes, types, targets or temperature out of range.
    """
    check_inputs("linear_logprobs", hidden, weight, targets, vocab_size, temperature)
    shard = VocabShard.of(weight, vocab_size, group)
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, weight, targets, temperature, shard, compute_entropy, reduce_hidden_grad, accumulate_main_grad
    )
    return LinearLogprobs(logprobs, entropy)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        targets,
        temperature,
        shard,
        compute_entropy,
        reduce_hidden_grad,
        accumulate_main_grad,
    ):
        tiles = LogitTiles(hidden, weight, shard, temperature)
        statistics = compute_row_statistics(tiles, targets, compute_entropy)
        entropy = statistics.entropy()
        ctx.save_for_backward(hidden, weight, targets, statistics.log2_normaliser(), entropy)
        ctx.temperature, ctx.shard = temperature, shard
        ctx.reduce_hidden_grad, ctx.accumulate_main_grad = reduce_hidden_grad, accumulate_main_grad
        ctx.set_materialize_grads(False)
        return statistics.logprobs(), entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, log2_normaliser, entropy = ctx.saved_tensors
        gradient = LogitGradient(LogitTiles(hidden, weight, ctx.shard, ctx.temperature), log2_normaliser)
        gradient.add_logprobs(grad_logprobs, targets)
        gradient.add_entropy(grad_entropy, entropy)
        return *recompute_gradients(
            gradient, ctx.needs_input_grad, ctx.reduce_hidden_grad, ctx.accumulate_main_grad
        ), *[None] * 6
