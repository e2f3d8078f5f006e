"""The packed input of one micro-batch: several prompts, each with the completions that share it.

    tree 0: | prompt | completion 0 | completion 1 | ...   tree 1: | prompt | ...

A completion's tokens attend to their prompt and to their own earlier tokens. With one completion a tree is a plain causal
sequence, so packing with and without shared prompts is one code path. Positions restart after the prompt for each completion.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams

# Trees up to this many tokens are padded to equal length and attended in one call under a mask; the call overhead of a loop costs
# more there than the padded products (measured on CPU: a loop over 64 sequences of 32 tokens is 1.25 x slower than one padded call).
DENSE_TREE_TOKENS = 256


@dataclass(frozen=True)
class Tree:
    """Lengths, in input tokens, of one prompt and of the completions that share it; `branches` may be empty or hold zeros."""

    prompt: int
    branches: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Input tokens of the tree."""
        return self.prompt + sum(self.branches)

    @property
    def is_chain(self) -> bool:
        """Say whether the tree is a plain causal sequence."""
        return sum(1 for branch in self.branches if branch) <= 1

    def mask(self) -> torch.Tensor:
        """Return the attention mask, bool [tokens, tokens]: row may attend column."""
        mask = torch.ones(self.tokens, self.tokens, dtype=torch.bool).tril()
        start = self.prompt
        for branch in self.branches:
            mask[start + branch :, start : start + branch] = False
            start += branch
        return mask

    def positions(self) -> torch.Tensor:
        """Return the position ids, int64 [tokens]."""
        return torch.cat([torch.arange(self.prompt), *(torch.arange(self.prompt, self.prompt + branch) for branch in self.branches)])


@dataclass(frozen=True)
class DenseBatch:
    """Trees attended in one padded call: n trees of at most S tokens."""

    index: torch.Tensor  # int64 [n, S]: where each token is in the packed input; padding points at the tree's first token
    mask: torch.Tensor  # bool [n, 1, S, S]
    valid: torch.Tensor  # bool [n, S]


@dataclass
class PackedTrees(PackedSeqParams):
    """`packed_seq_params` of a micro-batch for the local layer spec. The format name keeps Megatron from applying thd rules."""

    qkv_format: str = "trees"
    trees: tuple[Tree, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def rotary_positions(self) -> torch.Tensor:
        """Position ids of the packed input, int64 [T]."""
        return torch.cat([tree.positions() for tree in self.trees]).to(self.device)

    @cached_property
    def starts(self) -> list[int]:
        """Offset of each tree in the packed input."""
        starts, offset = [], 0
        for tree in self.trees:
            starts.append(offset)
            offset += tree.tokens
        return starts

    @cached_property
    def dense_batches(self) -> list[DenseBatch]:
        """Small trees, grouped by size so that padding stays under a quarter of a batch's rows."""
        small = [
            (tree.tokens, start, tree) for tree, start in zip(self.trees, self.starts, strict=True) if tree.tokens <= DENSE_TREE_TOKENS
        ]
        batches: list[list[tuple[int, int, Tree]]] = []
        for entry in sorted(small, key=lambda item: item[:2]):
            if batches and batches[-1][0][0] * 4 >= entry[0] * 3:
                batches[-1].append(entry)
            else:
                batches.append([entry])
        return [self._dense_batch(batch) for batch in batches]

    def _dense_batch(self, entries: list[tuple[int, int, Tree]]) -> DenseBatch:
        size = max(tokens for tokens, _, _ in entries)
        index = torch.empty(len(entries), size, dtype=torch.int64)
        mask = torch.eye(size, dtype=torch.bool).repeat(len(entries), 1, 1, 1)  # a padded row attends itself: no empty soft-max
        valid = torch.zeros(len(entries), size, dtype=torch.bool)
        for row, (tokens, start, tree) in enumerate(entries):
            index[row] = start
            index[row, :tokens] = torch.arange(start, start + tokens)
            mask[row, 0, :tokens, :tokens] = tree.mask()
            valid[row, :tokens] = True
        return DenseBatch(index.to(self.device), mask.to(self.device), valid.to(self.device))

    @cached_property
    def large_trees(self) -> list[tuple[int, Tree]]:
        """(offset, tree) of the trees that are attended one by one."""
        return [(start, tree) for tree, start in zip(self.trees, self.starts, strict=True) if tree.tokens > DENSE_TREE_TOKENS]

    @cached_property
    def order(self) -> torch.Tensor:
        """Packed positions in the order in which attention produces them: dense batches, then large trees; int64 [T]."""
        pieces = [batch.index[batch.valid] for batch in self.dense_batches]
        pieces += [torch.arange(start, start + tree.tokens, device=self.device) for start, tree in self.large_trees]
        return torch.cat(pieces)

    @cached_property
    def inverse_order(self) -> torch.Tensor:
        """Inverse permutation of `order`."""
        return torch.argsort(self.order)
