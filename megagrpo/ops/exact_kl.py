"""The exact KL divergence from actor to reference over the whole vocabulary, without logits of either.

Estimators of the KL see the sampled token alone; this is the sum over all of them, per token:

    KL(actor || reference) = sum_j p_j (ln p_j - ln q_j)

The reference is a constant. Both models' logits exist a tile at a time; log-prob and entropy of the same pass come along, so that a loss
that needs them too pays six GEMMs in all instead of ten.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.errors import UserError
from megagrpo.ops.logit_gradient import LogitGradient, recompute_gradients
from megagrpo.ops.logit_tiles import LogitTiles, view
from megagrpo.ops.row_statistics import LN2, RowStatistics
from megagrpo.ops.vocab_shard import VocabShard, check_inputs


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
    """KL(softmax(hidden @ weight.T / t) || softmax(reference_hidden @ reference_weight.T / t)), differentiable in hidden and weight.

    Collective over `group`: one MAX and one SUM all-reduce in the forward, and one SUM of dL/dhidden in the backward where
    `reduce_hidden_grad`; none where T is 0.

    Args:
        hidden: [T, H] float, the actor's. The same on every rank of the group.
        weight: [Vp, H] of the same type; rank r of the group holds rows r * Vp .. (r + 1) * Vp of the padded vocabulary.
        reference_hidden: [T, H'] float; H' may differ from H.
        reference_weight: [Vp, H'] of the same type, split alike.
        targets: [T] int64 global token ids, where the log-probs are wanted too.
        vocab_size: the true V; padded columns beyond it never take part.
        temperature: scalar or [T]; both models' logits are divided by it once.
        group: tensor-parallel group, None for one rank.
        reduce_hidden_grad: all-reduce dL/dhidden over the group; False where a sequence-parallel gather reduce-scatters it.
        accumulate_main_grad: add the weight's gradient in float32 to `weight.main_grad` where it has one.

    Returns:
        Divergence, entropy and log-probs of the rows.

    Raises:
        UserError: shapes, types, targets or temperature out of range.
    """
    check_inputs("linear_exact_kl", hidden, weight, targets, vocab_size, temperature)
    check_inputs("linear_exact_kl (reference)", reference_hidden, reference_weight, None, vocab_size, temperature)
    if len(reference_hidden) != len(hidden) or len(reference_weight) != len(weight):
        raise UserError(
            f"linear_exact_kl: the reference has {len(reference_hidden)} rows and {len(reference_weight)} columns, "
            f"the actor {len(hidden)} and {len(weight)}; they must be equal"
        )
    shard = VocabShard.of(weight, vocab_size, group)
    reference = LogitTiles(reference_hidden.detach(), reference_weight.detach(), shard, temperature)
    results = _LinearExactKl.apply(hidden, weight, reference, targets, temperature, shard, reduce_hidden_grad, accumulate_main_grad)
    return LinearExactKl(*results)


class _PairStatistics:
    """Statistics of actor and reference, and what their divergence needs.

    gap = sum_j 2^(x_j - m) ((x_j - m) - (y_j - n)), with the actor's base-2 logits x and maximum m, and the reference's y and n. Taking
    the difference for each column, before the sum, keeps a small divergence accurate.
    """

    def __init__(self, tiles: LogitTiles):
        self.actor = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_moment=True)
        self.reference = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_moment=False)
        self.gap = torch.zeros_like(self.actor.total)

    def update(self, rows: slice, x: Tensor, y: Tensor, scratch: Tensor) -> None:
        """Takes a tile of both models' logits [R, C] into account; all three tensors are lost."""
        shift, rescale = self.actor.recentre(rows, x, x)
        reference_shift, _ = self.reference.recentre(rows, y, y)
        self._move_gap(rows, shift - reference_shift, rescale)
        self.reference.total[rows].add_(torch.exp2(y, out=scratch).sum(dim=1))
        torch.sub(x, y, out=y)
        self.actor.total[rows].add_(torch.exp2(x, out=scratch).sum(dim=1))
        self.actor.moment[rows].add_(x.mul_(scratch).sum(dim=1))
        self.gap[rows].add_(y.mul_(scratch).sum(dim=1))

    def _move_gap(self, rows: slice, shift: Tensor, rescale: Tensor) -> None:
        self.gap[rows].mul_(rescale).addcmul_(self.actor.total[rows], shift)

    def all_reduce_(self, shard: VocabShard) -> None:
        """Collective over the shard's group: one MAX, one fused SUM."""
        if shard.group is None:
            return
        maxima = torch.stack([self.actor.maximum, self.reference.maximum])
        shard.all_reduce_max_(maxima)
        shift, rescale = self.actor.move_to(maxima[0])
        reference_shift, _ = self.reference.move_to(maxima[1])
        self._move_gap(slice(None), shift - reference_shift, rescale)
        sums = torch.cat([self.actor.sums, self.reference.sums, self.gap.unsqueeze(0)])
        shard.all_reduce_sum_(sums)
        self.actor.sums.copy_(sums[: len(self.actor.sums)])
        self.reference.sums.copy_(sums[len(self.actor.sums) : -1])
        self.gap.copy_(sums[-1])

    def kl(self) -> Tensor:
        """[T] divergence in nats; rounding may take a divergence of nearly 0 below it, hence the clamp."""
        return (self.gap / self.actor.total - torch.log2(self.actor.total / self.reference.total)).mul_(LN2).clamp_(min=0)


def _compute_pair_statistics(tiles: LogitTiles, reference: LogitTiles, targets: Tensor | None) -> _PairStatistics:
    """One pass over both models' logits. Collective over the shard's group: one MAX and one SUM."""
    statistics = _PairStatistics(tiles)
    buffers = [tiles.scratch() for _ in range(3)]
    for columns, weight in tiles.columns():
        reference_weight = reference.weight_operand(columns)
        for rows in tiles.rows():
            x, y, scratch = (view(buffer, rows, columns) for buffer in buffers)
            tiles.fill(x, rows, weight)
            reference.fill(y, rows, reference_weight)
            if targets is not None:
                inside, position = tiles.shard.locate(targets[rows], columns)
                statistics.actor.set_target(rows, x, inside, position)
                statistics.reference.set_target(rows, y, inside, position)
            statistics.update(rows, x, y, scratch)
    statistics.all_reduce_(tiles.shard)
    return statistics


class _LinearExactKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, reference, targets, temperature, shard, reduce_hidden_grad, accumulate_main_grad):
        statistics = _compute_pair_statistics(LogitTiles(hidden, weight, shard, temperature), reference, targets)
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
        tiles = LogitTiles(hidden, weight, ctx.shard, ctx.temperature)
        gradient = LogitGradient(tiles, log2_normaliser)
        gradient.add_logprobs(grad_logprobs, targets)
        gradient.add_entropy(grad_entropy, entropy)
        gradient.add_kl(grad_kl, kl, ctx.reference, reference_log2_normaliser)
        return *recompute_gradients(gradient, ctx.needs_input_grad, ctx.reduce_hidden_grad, ctx.accumulate_main_grad), *[None] * 6
