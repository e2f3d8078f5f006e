"""The exact KL divergence from actor to reference over the whole vocabulary, without logits of either.

Estimators of the KL see the sampled token alone; this is the sum over all of them, per token:

    KL(actor || reference) = sum_j p_j (ln p_j - ln q_j)

The reference is a constant. Both models' logits exist a tile at a time; log-prob and entropy of the same pass
come along, so that a loss that needs them too pays six GEMMs in all instead of ten.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.ops.logit_gradient import LogitGradient, recompute_gradients
from megagrpo.ops.logit_tiles import LogitTiles
from megagrpo.ops.pair_statistics import compute_pair_statistics
from megagrpo.ops.vocab_shard import VocabShard, check_inputs, check_reference


@dataclass(frozen=True)
class LinearExactKl:
    """Result of `linear_exact_kl`, all [T] float32 (float64 for float64 inputs).

    Attributes:
        kl: KL(actor || reference) in nats, never negative.
        entropy: the actor's entropy in nats.
        logprobs: the actor's log-prob of each target, None without targets.
        reference_logprobs: the reference's log-prob of each target, detached; None without targets.
    """

    kl: Tensor
    entropy: Tensor
    logprobs: Tensor | None
    reference_logprobs: Tensor | None


def linear_exact_kl(
    hidden: Tensor,
    weight: Tensor,
    reference_hidden: Tensor,
    reference_weight: Tensor,
    targets: Tensor | None = None,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    reduce_hidden_grad: bool = True,
    accumulate_main_grad: bool = True,
) -> LinearExactKl:
    """KL(softmax(hidden @ weight.T / t) || softmax(reference_hidden @ reference_weight.T / t)),
    differentiable in hidden and weight.

    Collective over `group`: one MAX and two SUM all-reduces in the forward, and one SUM of dL/dhidden in the
    backward where `reduce_hidden_grad`; none where T is 0.

    Args:
        hidden: [T, H] float, the actor's. The same on every rank of the group.
        weight: [Vp, H] of the same type; rank r of the group holds rows r * Vp .. (r + 1) * Vp of the padded
            vocabulary.
        reference_hidden: [T, H'] float; H' may differ from H.
        reference_weight: [Vp, H'] of the same type, split alike.
        targets: [T] int64 global token ids, where the log-probs are wanted too.
        vocab_size: the true V; padded columns beyond it never take part.
        temperature: scalar or [T]; both models' logits are divided by it once.
        group: tensor-parallel group, None for one rank.
        reduce_hidden_grad: all-reduce dL/dhidden over the group; False where a sequence-parallel gather
            reduce-scatters it.
        accumulate_main_grad: add the weight's gradient in float32 to `weight.main_grad` where it has one.

    Returns:
        Divergence, entropy and log-probs of the rows.

    Raises:
        UserError: shapes, types, targets or temperature out of range.
    """
    check_inputs("linear_exact_kl", hidden, weight, targets, vocab_size, temperature)
    check_reference("linear_exact_kl", reference_hidden, reference_weight, hidden, weight)
    shard = VocabShard.of(weight, vocab_size, group)
    reference = LogitTiles(
        reference_hidden.detach(), reference_weight.detach(), shard, temperature, bounds=True
    )
    results = _LinearExactKl.apply(
        hidden, weight, reference, targets, temperature, shard, reduce_hidden_grad, accumulate_main_grad
    )
    return LinearExactKl(*results)


class _LinearExactKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, reference, targets, temperature, shard, reduce_hidden_grad, accumulate_main_grad
    ):
        statistics = compute_pair_statistics(
            LogitTiles(hidden, weight, shard, temperature, bounds=True), reference, targets
        )
        kl, entropy = statistics.kl(), statistics.actor.entropy()
        logprobs = reference_logprobs = None
        if targets is not None:
            logprobs, reference_logprobs = statistics.actor.logprobs(), statistics.reference.logprobs()
            ctx.mark_non_differentiable(reference_logprobs)
        normalisers = (statistics.actor.log2_normaliser(), statistics.reference.log2_normaliser())
        ctx.save_for_backward(hidden, weight, targets, kl, entropy, *normalisers)
        ctx.reference, ctx.temperature, ctx.shard = reference, temperature, shard
        ctx.reduce_hidden_grad, ctx.accumulate_main_grad = reduce_hidden_grad, accumulate_main_grad
        ctx.set_materialize_grads(False)
        return kl, entropy, logprobs, reference_logprobs

    @staticmethod
    def backward(ctx, grad_kl, grad_entropy, grad_logprobs, _unused):
        hidden, weight, targets, kl, entropy, log2_normaliser, reference_log2_normaliser = ctx.saved_tensors
        tiles = LogitTiles(hidden, weight, ctx.shard, ctx.temperature, bounds=True)
        gradient = LogitGradient(tiles, log2_normaliser)
        gradient.add_logprobs(grad_logprobs, targets)
        gradient.add_entropy(grad_entropy, entropy)
        gradient.add_kl(grad_kl, kl, ctx.reference, reference_log2_normaliser)
        return *recompute_gradients(
            gradient, ctx.needs_input_grad, ctx.reduce_hidden_grad, ctx.accumulate_main_grad
        ), *[None] * 6
