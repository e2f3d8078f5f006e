"""Which sequences a micro-batch holds: what the experts' loads and balance loss are counted by (see
experts.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megagrpo.parallel.token_shard import TokenShard


@dataclass(frozen=True)
class RoutedSequences:
    """The sequence of each token of a micro-batch on this context parallel rank.

    A sequence is a prompt and one completion. The tokens fall into segments (prompts, branches, padding) and
    a sequence is two of them; so a sum over a sequence is the same whether its prompt is shared or not.
    """

    segment_ids: torch.Tensor  # int64 [T / cp]; padding is in the last segment
    prompts: torch.Tensor  # int64 [S]: segment of each sequence's prompt
    branches: torch.Tensor  # int64 [S]
    lengths: torch.Tensor  # float64 [S]: tokens of prompt and branch, on all ranks
    weight: float  # what one sequence counts in the mean over the optimizer update

    def local_segment_ids(self, count: int, tp_group: dist.ProcessGroup) -> torch.Tensor:
        """Return the segment ids of the `count` tokens that this rank routes: all, or its part of them
        under sequence parallelism.
        """
        if count == len(self.segment_ids):
            return self.segment_ids
        assert count * tp_group.size() == len(self.segment_ids), (
            count,
            tp_group.size(),
            len(self.segment_ids),
        )
        return self.segment_ids[tp_group.rank() * count : (tp_group.rank() + 1) * count]

    def sums(self, segment_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` [t, E] of the tokens in segments `segment_ids` [t] over each sequence: [S, E]."""
        segments = values.new_zeros(len(self.prompts) * 2 + 1, values.shape[1]).index_add(
            0, segment_ids, values
        )
        return segments[self.prompts] + segments[self.branches]


@dataclass
class RoutedPackedSeqParams(PackedSeqParams):
    """`packed_seq_params` that tell the routers of a mixture of experts which sequences there are."""

    routed: RoutedSequences | None = None


def route_sequences(
    trees: Sequence[tuple[int, Sequence[int]]],
    shard: TokenShard,
    sequences_per_update: int,
    device: torch.device,
) -> RoutedSequences:
    """Return the sequences of a micro-batch.

    Args:
        trees: (prompt tokens, tokens of each branch) of each tree; one without branches is padding.
        shard: the rank's tokens. Its stretches, where there is one for each tree, are longer than the trees
            by their padding.
        sequences_per_update: sequences of the optimizer update, over all micro-batches and replicas.
        device: of the tensors.
    """
    padding = 2 * sum(len(branches) for _, branches in trees)
    padded = (
        shard.stretches
        if len(shard.stretches) == len(trees)
        else [prompt + sum(branches) for prompt, branches in trees]
    )
    segments, prompts, lengths = [], [], []
    for (prompt, branches), total in zip(trees, padded, strict=True):
        first = 2 * len(prompts)
        segments += [(first if branches else padding, prompt)]
        segments += [(first + 2 * number + 1, branch) for number, branch in enumerate(branches)]
        segments += [(padding, total - prompt - sum(branches))]
        prompts += [first] * len(branches)
        lengths += [prompt + branch for branch in branches]
    ids, sizes = torch.tensor(segments, dtype=torch.int64).unbind(1)
    return RoutedSequences(
        torch.repeat_interleave(ids, sizes)[shard.packed_positions()].to(device),
        torch.tensor(prompts, dtype=torch.int64, device=device),
        torch.arange(len(prompts), device=device) * 2 + 1,
        torch.tensor(lengths, dtype=torch.float64, device=device),
        1 / sequences_per_update,
    )
