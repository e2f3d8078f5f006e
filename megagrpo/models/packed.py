"""The packed input of one micro-batch: several prompts, each with the completions that share it.

    tree 0: | prompt | completion 0 | completion 1 | ...   tree 1: | prompt | ...

A completion's tokens attend to their prompt and to their own earlier tokens. With one completion a tree is a
plain causal sequence, so packing with and without shared prompts is one code path. Positions restart after
the prompt for each completion.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from megagrpo.models.routing import RoutedPackedSeqParams
from megagrpo.parallel.token_shard import TokenShard

# Trees up to this many tokens are padded to equal length and attended in one call under a mask; the call
# overhead of a loop costs more there than the padded products (measured on CPU: a loop over 64 sequences of
# 32 tokens is 1.25 x slower than one padded call).
DENSE_TREE_TOKENS = 256


@dataclass(frozen=True)
class Tree:
    """Lengths, in input tokens, of one prompt and of the completions that share it; `branches` may be
    empty or hold zeros.
    """

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

    def segments(self) -> list[tuple[int, int, int]]:
        """Return (prompt tokens that all its rows attend, start within the tree, length) of each causal
        part: prompt, branches.
        """
        if self.is_chain:
            return [(0, 0, self.tokens)]
        starts = accumulate(self.branches[:-1], initial=self.prompt)
        return [
            (0, 0, self.prompt),
            *((self.prompt, start, length) for start, length in zip(starts, self.branches, strict=True)),
        ]

    def positions(self) -> torch.Tensor:
        """Return the position ids, int64 [tokens]."""
        return torch.cat(
            [
                torch.arange(self.prompt),
                *(torch.arange(self.prompt, self.prompt + branch) for branch in self.branches),
            ]
        )


@dataclass(frozen=True)
class DenseBatch:
    """Trees attended in one padded call: n trees of at most S tokens, at most Q of them on this rank."""

    rows: torch.Tensor  # int64 [n, Q]: local position of each query; padding points at some row
    keys: torch.Tensor  # int64 [n, S]: packed position of each key; padding points at the tree's first token
    mask: torch.Tensor  # bool [n, 1, Q, S]
    valid: torch.Tensor  # bool [n, Q]
    row_positions: torch.Tensor  # int64 [n, Q]: position ids of the queries
    key_positions: torch.Tensor  # int64 [n, S]

    def mask_within(self, window: int | None) -> torch.Tensor:
        """Return the mask, bool [n, 1, Q, S], of attention that sees `window` tokens, a row's own among them;
        None: all.
        """
        if window is None:
            return self.mask
        distances = self.row_positions[:, None, :, None] - self.key_positions[:, None, None, :]
        return self.mask & (distances < window)


@dataclass(frozen=True)
class QueryRun:
    """Consecutive queries of one branch (or prompt) that this rank holds, attended in one call."""

    rows: slice  # local positions
    prompt: slice  # packed positions that each of them attends
    branch: slice  # packed positions of the branch up to the last of them
    first: int  # index of the first of them in the branch

    def mask_within(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return the mask, bool [rows, prompt + branch], as `DenseBatch` does; None: the plain triangle."""
        prompt, branch = self.prompt.stop - self.prompt.start, self.branch.stop - self.branch.start
        own = prompt + self.first  # column of the first row's own token
        if own == 0 and (window is None or branch <= window):
            return None
        mask = torch.ones(self.rows.stop - self.rows.start, prompt + branch, dtype=torch.bool, device=device)
        mask = mask.tril(own)
        return mask if window is None else mask.triu(own - window + 1)


@dataclass
class PackedTrees(RoutedPackedSeqParams):
    """`packed_seq_params` of a micro-batch for the local layer spec. The format name keeps Megatron from
    applying thd rules.

    The trees are those of the whole micro-batch; a context parallel rank computes the queries in `shard` and
    sees all keys.
    """

    qkv_format: str = "trees"
    trees: tuple[Tree, ...] = ()
    shard: TokenShard = None  # type: ignore[assignment]  (None is replaced at once: all tokens are here)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.shard = self.shard or TokenShard((sum(tree.tokens for tree in self.trees),))

    @cached_property
    def rotary_positions(self) -> torch.Tensor:
        """Position ids of this rank's tokens, int64 [T / cp]."""
        return torch.cat([tree.positions() for tree in self.trees])[self.shard.packed_positions()].to(
            self.device
        )

    @cached_property
    def starts(self) -> list[int]:
        """Offset of each tree in the packed input."""
        return list(accumulate((tree.tokens for tree in self.trees[:-1]), initial=0))

    @cached_property
    def dense_batches(self) -> list[DenseBatch]:
        """Small trees with tokens on this rank, grouped by size so that padding stays under a quarter of a
        batch's keys.
        """
        local = self.shard.local_positions()
        small = [
            (tree.tokens, start, tree)
            for tree, start in zip(self.trees, self.starts, strict=True)
            if tree.tokens <= DENSE_TREE_TOKENS and bool((local[start : start + tree.tokens] >= 0).any())
        ]
        batches: list[list[tuple[int, int, Tree]]] = []
        for entry in sorted(small, key=lambda item: item[:2]):
            if batches and batches[-1][0][0] * 4 >= entry[0] * 3:
                batches[-1].append(entry)
            else:
                batches.append([entry])
        return [self._dense_batch(batch, local) for batch in batches]

    def _dense_batch(self, entries: list[tuple[int, int, Tree]], local: torch.Tensor) -> DenseBatch:
        # index within the tree
        held = [(local[start : start + tokens] >= 0).nonzero()[:, 0] for tokens, start, _ in entries]
        num_rows, num_keys = max(map(len, held)), max(tokens for tokens, _, _ in entries)
        rows = torch.zeros(len(entries), num_rows, dtype=torch.int64)
        keys = torch.empty(len(entries), num_keys, dtype=torch.int64)
        mask = torch.zeros(len(entries), 1, num_rows, num_keys, dtype=torch.bool)
        valid = torch.zeros(len(entries), num_rows, dtype=torch.bool)
        row_positions, key_positions = torch.zeros_like(rows), torch.zeros_like(keys)
        for number, ((tokens, start, tree), own) in enumerate(zip(entries, held, strict=True)):
            rows[number, : len(own)] = local[start + own]
            keys[number] = start
            keys[number, :tokens] = torch.arange(start, start + tokens)
            mask[number, 0, : len(own), :tokens] = tree.mask()[own]
            mask[number, 0, len(own) :, 0] = True  # a padded row attends something: no empty soft-max
            valid[number, : len(own)] = True
            key_positions[number, :tokens] = tree.positions()
            row_positions[number, : len(own)] = tree.positions()[own]
        tensors = (rows, keys, mask, valid, row_positions, key_positions)
        return DenseBatch(*(tensor.to(self.device) for tensor in tensors))

    @cached_property
    def runs(self) -> list[QueryRun]:
        """The queries of this rank in large trees, each run attended by itself."""
        runs = []
        for tree, start in zip(self.trees, self.starts, strict=True):
            if tree.tokens > DENSE_TREE_TOKENS:
                for prompt, branch_start, length in tree.segments():
                    runs += self._runs_of(slice(start, start + prompt), start + branch_start, length)
        return runs

    def _runs_of(self, prompt: slice, branch_start: int, length: int) -> list[QueryRun]:
        runs, offset = [], 0
        for interval_start, interval_stop in self.shard.intervals:
            start, stop = max(interval_start, branch_start), min(interval_stop, branch_start + length)
            if start < stop:
                rows = slice(offset + start - interval_start, offset + stop - interval_start)
                runs.append(QueryRun(rows, prompt, slice(branch_start, stop), start - branch_start))
            offset += interval_stop - interval_start
        return runs

    @cached_property
    def inverse_order(self) -> torch.Tensor:
        """Where attention produces each local token (dense batches first, then runs): int64 [T / cp]."""
        order = [batch.rows[batch.valid] for batch in self.dense_batches]
        order += [torch.arange(run.rows.start, run.rows.stop, device=self.device) for run in self.runs]
        return torch.argsort(torch.cat(order))
