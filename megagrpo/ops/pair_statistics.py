"""Softmax statistics of two models over the same vocabulary tiles, for the divergence of one from the
other.
"""

import torch
from torch import Tensor

from megagrpo.ops.logit_tiles import LogitStash, LogitTiles, view
from megagrpo.ops.row_statistics import LN2, RowStatistics
from megagrpo.ops.vocab_shard import VocabShard


class PairStatistics:
    """Statistics of actor and reference, and what their divergence needs.

    gap = sum_j 2^(x_j - m) ((x_j - m) - (y_j - n)), with the actor's base-2 logits x and maximum m, and the
    reference's y and n. Taking the difference for each column, before the sum, keeps a small divergence
    accurate.
    """

    def __init__(self, tiles: LogitTiles):
        self.actor = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_moment=True)
        self.reference = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_moment=False)
        self.gap = torch.zeros_like(self.actor.total)

    def update(self, rows: slice, x: Tensor, y: Tensor, scratch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Takes a tile of both models' logits x, y [R, C] into account; the first two of the [R, C]
        scratch may be x and y themselves.
        """
        centred, gap, exponential = scratch
        shift, rescale = self.actor.recentre(rows, x, centred)
        reference_shift, _ = self.reference.recentre(rows, y, gap)
        self._move_gap(rows, shift - reference_shift, rescale)
        self.reference.total[rows].add_(torch.exp2(gap, out=exponential).sum(dim=1))
        torch.sub(centred, gap, out=gap)
        self.actor.total[rows].add_(torch.exp2(centred, out=exponential).sum(dim=1))
        self.actor.moment[rows].add_(centred.mul_(exponential).sum(dim=1))
        self.gap[rows].add_(gap.mul_(exponential).sum(dim=1))

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
        return (
            (self.gap / self.actor.total - torch.log2(self.actor.total / self.reference.total))
            .mul_(LN2)
            .clamp_(min=0)
        )


def compute_pair_statistics(
    tiles: LogitTiles,
    reference: LogitTiles,
    targets: Tensor | None,
    stash: LogitStash | None = None,
    reference_stash: LogitStash | None = None,
) -> PairStatistics:
    """One pass over both models' logits. Collective over the shard's group: one MAX and one SUM.

    Args:
        tiles: the actor's logits.
        reference: the reference's.
        targets: [T] global ids, or None.
        stash: receives the actor's logits, or None.
        reference_stash: receives the reference's, or None.
    """
    statistics = PairStatistics(tiles)
    buffers = [tiles.scratch() for _ in range(3)]
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
