"""Softmax statistics of rows whose logits are seen one vocabulary tile at a time.

Everything is in base 2: x = logit * log2(e) / temperature, so that the exponentials are `exp2` (a third of
the cost of `exp` on a CPU) and the factor rides along in the GEMM. With m the running maximum, a row keeps
(Milakov & Gimelshein 2018, arXiv:1805.02867, Algorithm 3, extended by the first moment)

    total = sum_j 2^(x_j - m)        moment = sum_j 2^(x_j - m) (x_j - m)        target = x_y

from which log2-normaliser = m + log2(total) and entropy = ln 2 * (log2(total) - moment / total).
"""

import math

import torch
from torch import Tensor

from megagrpo.ops.fused_passes import LOWEST_LOGIT, is_fused, tile_statistics
from megagrpo.ops.vocab_shard import VocabShard

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2


class RowStatistics:
    """Running statistics of [T] rows.

    Args:
        num_rows: T.
        dtype: float32 or float64.
        device: where they live.
        with_moment: keep what the entropy needs.
    """

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device, with_moment: bool):
        self.maximum = torch.full((num_rows,), LOWEST_LOGIT, dtype=dtype, device=device)
        # total, target and moment lie in one buffer, so that one SUM all-reduce carries them.
        self.sums = torch.zeros((3 if with_moment else 2, num_rows), dtype=dtype, device=device)
        self.total, self.target = self.sums[0], self.sums[1]
        self.moment = self.sums[2] if with_moment else None

    def update(self, rows: slice, x: Tensor, centred: Tensor, exponential: Tensor) -> None:
        """Takes a tile into account.

        Args:
            rows: which rows.
            x: [R, C] base-2 logits.
            centred: [R, C] scratch, may be `x` itself, which is then lost.
            exponential: [R, C] scratch; may be `centred` where no moment is kept.
        """
        if is_fused(x.device):
            self._update_fused(rows, x)
            return
        raised = torch.maximum(self.maximum[rows], x.amax(dim=1))
        self.move_to(raised, rows)
        torch.sub(x, raised.unsqueeze(1), out=centred)
        torch.exp2(centred, out=exponential)
        self.total[rows].add_(exponential.sum(dim=1))
        if self.moment is not None:
            self.moment[rows].add_(centred.mul_(exponential).sum(dim=1))

    def _update_fused(self, rows: slice, x: Tensor) -> None:
        raised, total, moment = tile_statistics(x, self.maximum[rows], self.moment is not None)
        self.move_to(raised, rows)
        self.total[rows].add_(total)
        if self.moment is not None:
            self.moment[rows].add_(moment)

    def _rescale(self, rows: slice, shift: Tensor) -> Tensor:
        rescale = torch.exp2(shift)
        total = self.total[rows].mul_(rescale)
        if self.moment is not None:
            # sum 2^(x-m') (x-m') = 2^(m-m') (moment + (m - m') total). Where no column was seen, a shift of
            # -1e30 meets a total of 0.
            self.moment[rows].mul_(rescale).addcmul_(total, shift)
        return rescale

    def move_to(self, maximum: Tensor, rows: slice = slice(None)) -> Tensor:
        """Expresses the sums of `rows` relative to `maximum` [R], at least the present one.

        Returns:
            [R] what the sums were multiplied by, 2^(old maximum - new maximum).
        """
        shift = self.maximum[rows] - maximum
        self.maximum[rows].copy_(maximum)
        return self._rescale(rows, shift)

    def set_target(self, rows: slice, x: Tensor, inside: Tensor, position: Tensor) -> None:
        """Keeps the target's logit of the rows [R] whose target lies `inside` the tile x [R, C] at
        `position` [R, 1].
        """
        target = self.target[rows]
        torch.where(inside, x.gather(1, position).squeeze(1), target, out=target)

    def all_reduce_(self, shard: VocabShard) -> None:
        """Collective over the shard's group: one MAX, one fused SUM. Afterwards every rank has the whole
        vocabulary's statistics.
        """
        if shard.group is not None:
            maximum = self.maximum.clone()
            shard.all_reduce_max_(maximum)
            self.move_to(maximum)
            shard.all_reduce_sum_(self.sums)

    def log2_normaliser(self) -> Tensor:
        """[T] log2 of the sum of 2^x."""
        return self.maximum + torch.log2(self.total)

    def logprobs(self) -> Tensor:
        """[T] natural log-prob of the targets; never positive, -inf where the target's logit is."""
        logprobs = ((self.target - self.maximum) - torch.log2(self.total)) * LN2
        return torch.where(self.target > LOWEST_LOGIT, logprobs, -torch.inf)

    def entropy(self) -> Tensor | None:
        """[T] entropy in nats, None where no moment is kept."""
        return None if self.moment is None else (torch.log2(self.total) - self.moment / self.total) * LN2
