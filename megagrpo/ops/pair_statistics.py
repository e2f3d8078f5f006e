"""Softmax statistics of two models over the same vocabulary tiles, for the divergence of one from the
other.

With p of the actor and q of the reference, b_j = ln p_j - ln q_j, and because both sum to 1,

    KL(p || q) = sum_j p_j b_j = sum_j p_j (b_j + exp(-b_j) - 1)

The summands of the second form are never negative, and of size b^2 / 2 where the models nearly agree: nothing
cancels, so a divergence of 1e-7 keeps its digits in float32, whose sums of the first form end at 1e-7.

The normalisers of p and q are known at the end only. So each part of the vocabulary (a tile, a rank's shard)
is normalised by itself, and parts are put together by the chain rule of the divergence: that of the whole is
the mean of those of the parts, plus that of the parts' masses, a sum of the same form.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.ops.logit_tiles import LogitStash, LogitTiles, view
from megagrpo.ops.row_statistics import LN2, RowStatistics
from megagrpo.ops.vocab_shard import VocabShard

# exp(-b) p is q up to normalisers, which is finite; as exp(-b) times p it would overflow from b = -88 on.
_LARGEST_EXPONENT = 20.0


class Masses(NamedTuple):
    """What a part of the vocabulary holds of both models, each [R]: sum 2^(x_j - maximum) = total.

    Relative to the part's own maximum a total is between 1 and the number of columns: it never underflows.
    """

    maximum: Tensor
    total: Tensor
    reference_maximum: Tensor
    reference_total: Tensor


class PairStatistics:
    """Statistics of actor and reference, and `divergence` [T]: the actor's total times the KL of the columns
    seen so far, each model normalised over them.
    """

    def __init__(self, tiles: LogitTiles):
        self.actor = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_moment=True)
        self.reference = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_moment=False)
        self.divergence = torch.zeros_like(self.actor.total)

    def update(self, rows: slice, x: Tensor, y: Tensor, scratch: tuple[Tensor, ...]) -> None:
        """Takes a tile of both models' base-2 logits x, y [R, C] into account; the first two of the four
        [R, C] scratch tensors may be x and y themselves.
        """
        centred, reference_centred, p, q = scratch
        maximum, reference_maximum = x.amax(dim=1), y.amax(dim=1)
        torch.sub(x, maximum.unsqueeze(1), out=centred)
        torch.sub(y, reference_maximum.unsqueeze(1), out=reference_centred)
        torch.exp2(centred, out=p)
        moment = torch.mul(centred, p, out=q).sum(dim=1)
        torch.exp2(reference_centred, out=q)
        tile = Masses(maximum, p.sum(dim=1), reference_maximum, q.sum(dim=1))
        ratio = (tile.total / tile.reference_total).unsqueeze(1)
        b = centred.sub_(reference_centred).mul_(LN2).sub_(torch.log(ratio))
        within = _divergence_terms_(b, p, q.mul_(ratio), reference_centred).sum(dim=1)
        self._add_tile(rows, tile, moment, within)

    def _add_tile(self, rows: slice, tile: Masses, moment: Tensor, within: Tensor) -> None:
        before = self._masses(rows)
        raised = torch.maximum(before.maximum, tile.maximum)
        rescale = self.actor.move_to(raised, rows)
        self.reference.move_to(torch.maximum(before.reference_maximum, tile.reference_maximum), rows)
        shift = tile.maximum - raised
        scale = torch.exp2(shift)
        scaled = tile.total * scale
        self.actor.total[rows].add_(scaled)
        self.actor.moment[rows].add_(moment * scale).addcmul_(scaled, shift)
        reference_scale = torch.exp2(tile.reference_maximum - self.reference.maximum[rows])
        self.reference.total[rows].add_(tile.reference_total * reference_scale)
        after = self._masses(rows)
        divergence = self.divergence[rows]
        divergence.mul_(rescale).add_(within * scale)
        divergence.add_(_divergence_of_part(before, after)).add_(_divergence_of_part(tile, after))

    def _masses(self, rows: slice = slice(None)) -> Masses:
        statistics = (
            self.actor.maximum,
            self.actor.total,
            self.reference.maximum,
            self.reference.total,
        )
        return Masses(*(values[rows].clone() for values in statistics))

    def all_reduce_(self, shard: VocabShard) -> None:
        """Collective over the shard's group: one MAX, one fused SUM, and one SUM of the divergence, which
        needs the masses of the whole.
        """
        if shard.group is None:
            return
        mine = self._masses()
        maxima = torch.stack([mine.maximum, mine.reference_maximum])
        shard.all_reduce_max_(maxima)
        rescale = self.actor.move_to(maxima[0])
        self.reference.move_to(maxima[1])
        sums = torch.cat([self.actor.sums, self.reference.sums])
        shard.all_reduce_sum_(sums)
        self.actor.sums.copy_(sums[: len(self.actor.sums)])
        self.reference.sums.copy_(sums[len(self.actor.sums) :])
        self.divergence.mul_(rescale).add_(_divergence_of_part(mine, self._masses()))
        shard.all_reduce_sum_(self.divergence)

    def kl(self) -> Tensor:
        """[T] divergence in nats; rounding may take a divergence of nearly 0 below it, hence the clamp."""
        return (self.divergence / self.actor.total).clamp_(min=0)


def _divergence_terms_(b: Tensor, p: Tensor, q: Tensor, scratch: Tensor) -> Tensor:
    """P (b + exp(-b) - 1) [...] in place of b; q [...] is exp(-b) p, taken where exp(-b) alone would
    overflow. q and the scratch of the same shape are lost.
    """
    decay = torch.neg(b, out=scratch).clamp_(max=_LARGEST_EXPONENT).expm1_().mul_(p)
    torch.where(b < -_LARGEST_EXPONENT, q.sub_(p), decay, out=decay)
    return b.mul_(p).add_(decay)


def _divergence_of_part(part: Masses, whole: Masses) -> Tensor:
    """A part's [R] summand of the divergence of the parts' masses, times the whole's total."""
    # bounds the masses of a part without columns, whose weight is 0, away from 0
    tiny = torch.finfo(part.total.dtype).tiny
    shift, reference_shift = (
        part.maximum - whole.maximum,
        part.reference_maximum - whole.reference_maximum,
    )
    ratio = part.total * whole.reference_total / (part.reference_total * whole.total).clamp(min=tiny)
    b = (shift - reference_shift) * LN2 + torch.log(ratio.clamp(min=tiny))
    q = part.reference_total * torch.exp2(reference_shift) * (whole.total / whole.reference_total)
    return _divergence_terms_(b, part.total * torch.exp2(shift), q, torch.empty_like(b))


def compute_pair_statistics(
    tiles: LogitTiles,
    reference: LogitTiles,
    targets: Tensor | None,
    stash: LogitStash | None = None,
    reference_stash: LogitStash | None = None,
) -> PairStatistics:
    """One pass over both models' logits. Collective over the shard's group: one MAX and two SUMs.

    Args:
        tiles: the actor's logits.
        reference: the reference's.
        targets: [T] global ids, or None.
        stash: receives the actor's logits, or None.
        reference_stash: receives the reference's, or None.
    """
    statistics = PairStatistics(tiles)
    buffers = [tiles.scratch() for _ in range(4)]
    for columns, weight in tiles.columns():
        reference_weight = reference.weight_operand(columns)
        for rows in tiles.rows():
            x = tiles.tile(buffers[0], stash, rows, columns)
            y = tiles.tile(buffers[1], reference_stash, rows, columns)
            tiles.fill(x, rows, weight)
            reference.fill(y, rows, reference_weight)
            if targets is not None:
                inside, position = tiles.shard.locate(targets[rows], columns)
                statistics.actor.set_target(rows, x, inside, position)
                statistics.reference.set_target(rows, y, inside, position)
            statistics.update(rows, x, y, tuple(view(buffer, rows, columns) for buffer in buffers))
    statistics.all_reduce_(tiles.shard)
    return statistics
