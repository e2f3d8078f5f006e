"""Context parallelism: which packed tokens a rank holds, and the exchange of what attention needs of the
others.

A stretch of tokens is cut into 2 * cp equal chunks; rank r holds chunks r and 2 * cp - 1 - r, one after the
other. A causal row costs as much as the rows before it, so an early and a late chunk together cost alike on
every rank.

    cp 2, 16 tokens:   chunk 0 | chunk 1 | chunk 2 | chunk 3        rank 0: 0 .. 3 and 12 .. 15, rank 1: 4 ..
        11

Our own attention gathers all keys, so any assignment is right: the whole micro-batch is one stretch and only
T must divide, whatever the lengths of the sequences in it. Transformer Engine wants each sequence cut like
this: one stretch a sequence, each padded to 2 * cp.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TokenShard:
    """The packed positions of one context parallel rank; all of them where cp is 1."""

    stretches: tuple[int, ...]  # lengths; T together, of the whole micro-batch
    cp: int = 1
    cp_rank: int = 0

    def __post_init__(self) -> None:
        undivided = [length for length in self.stretches if self.cp > 1 and length % (2 * self.cp)]
        assert not undivided, (
            f"stretches of {undivided} tokens are not padded to multiples of 2 * cp {self.cp}"
        )

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.stretches)

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """The rank's packed positions as (start, stop), in the order in which it holds them."""
        if self.cp == 1:
            return [(0, self.tokens)]
        intervals = []
        for start, length in zip(accumulate(self.stretches, initial=0), self.stretches, strict=False):
            chunk = length // (2 * self.cp)
            intervals += [
                (start + k * chunk, start + (k + 1) * chunk)
                for k in (self.cp_rank, 2 * self.cp - 1 - self.cp_rank)
            ]
        return intervals

    def chunks(self) -> torch.Tensor:
        """Return which chunk of its stretch each local token is in, int64 [T / cp]: the order of tokens that
        several ranks hold.
        """
        numbers = (self.cp_rank, 2 * self.cp - 1 - self.cp_rank) if self.cp > 1 else (0,)
        return torch.cat(
            [
                torch.full((stop - start,), numbers[k % len(numbers)])
                for k, (start, stop) in enumerate(self.intervals)
            ]
        )

    def packed_positions(self) -> torch.Tensor:
        """Return the packed position of each local token, int64 [T / cp]."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.intervals])

    def local_positions(self) -> torch.Tensor:
        """Return the local position of each packed token, int64 [T]; -1 for those on other ranks."""
        local = torch.full((self.tokens,), -1, dtype=torch.int64)
        packed = self.packed_positions()
        local[packed] = torch.arange(len(packed))
        return local


def all_gather_tokens(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the rows of all context parallel ranks in packed order, of one stretch: [T / cp, ...] -> [T,
    ...].

    Collective over `group`: an all-gather in the forward, a reduce-scatter of the gradient in the backward.
    Differentiable.
    """
    return local if group is None or group.size() == 1 else _AllGatherTokens.apply(local, group)


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        early, late = gathered.view(group.size(), 2, -1, *local.shape[1:]).unbind(1)
        return torch.cat([early, late.flip(0)]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        cp = ctx.group.size()
        early, late = grad.reshape(2, cp, -1, *grad.shape[1:]).unbind(0)
        by_rank = torch.stack([early, late.flip(0)], dim=1).flatten(0, 2)
        local = grad.new_empty(grad.shape[0] // cp, *grad.shape[1:])
        dist.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None


def sum_sequences(
    values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the sum of `values` [R] over each sequence's rows on all context parallel ranks:
    [num_sequences], detached.

    Collective over `group`: one all-reduce; ranks without a row of any sequence take part too.
    """
    sums = values.new_zeros(num_sequences).index_add(0, sequence_ids, values.detach())
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums


def sum_following(
    values: torch.Tensor,
    sequence_ids: torch.Tensor,
    chunks: torch.Tensor,
    num_sequences: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return for each row the sum of `values` [R] over it and all later rows of its sequence, those of other
    context parallel ranks included: [R] float64 on the CPU, detached.

    Collective over `group`: one all-reduce of one sum per sequence and chunk.

    Args:
        values: of this rank's rows; rows of a sequence stand together, in the order of their positions.
        sequence_ids: [R] int64, ascending.
        chunks: [R] int64, `TokenShard.chunks` of the rows.
        num_sequences: B.
        group: the context parallel group.
    """
    num_chunks = 2 * group.size()
    segments = sequence_ids * num_chunks + chunks  # ascends with the rows
    sums = torch.zeros(num_sequences * num_chunks, dtype=torch.float64, device=values.device)
    sums.index_add_(0, segments, values.detach().double())
    # a running sum over the rows, less that of all segments behind the row's own
    local, segments = values.detach().double().cpu(), segments.cpu()
    within = _sum_from(local) - (_sum_from(sums.cpu()) - sums.cpu())[segments]
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    by_chunk = sums.cpu().view(num_sequences, num_chunks)
    later_chunks = _sum_from(by_chunk.T).T - by_chunk
    return within + later_chunks.flatten()[segments]


def _sum_from(values: torch.Tensor) -> torch.Tensor:
    """Return the sum from each place of the first dimension to its end."""
    return values.flip(0).cumsum(0).flip(0)
