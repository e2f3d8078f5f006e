"""Plans which data parallel rank trains which completions, in which micro-batches. Pure: lengths in, indices
out.

All ranks run it on the same metadata and so agree without talking. Guarantees: no micro-batch holds more than
the token budget (alignment padding included), every data parallel rank gets the same number of micro-batches,
and their costs are balanced.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.errors import UserError


@dataclass(frozen=True)
class SampleSize:
    """What the planner needs to know of one completion."""

    group: int  # completions of one group share their prompt
    prompt_tokens: int
    completion_tokens: int

    @property
    def branch_tokens(self) -> int:
        """Input tokens behind the prompt: the last completion token is predicted, never read."""
        return self.completion_tokens - 1


@dataclass(frozen=True)
class TreePlan:
    """One prompt and the samples that share it in one micro-batch."""

    samples: tuple[int, ...]  # indices into the planned samples
    tokens: int  # padding to `PackingRules.sequence_alignment` included
    longest: int  # tokens of the longest sequence: attention cost

    def cost(self, hidden_size: int) -> float:
        """Relative compute: linear layers are 24 h^2 a token, attention 4 h S, so a token costs about 6 h
        + S.
        """
        return self.tokens * (6.0 * hidden_size + self.longest)


@dataclass(frozen=True)
class PackingRules:
    """The settings that shape micro-batches."""

    max_tokens: int
    alignment: int = 1  # packed token counts are padded to a multiple of this
    packing: bool = True
    share_prompts: bool = True
    min_microbatches: int = 1  # per data parallel rank, where there are enough trees: fills the pipeline
    # micro-batches per data parallel rank are a multiple of this (empty ones fill up)
    microbatch_multiple: int = 1
    sequence_alignment: int = 1  # each tree is padded to a multiple of this, a divisor of `alignment`

    @property
    def budget(self) -> int:
        """Tokens that a micro-batch may hold before alignment padding."""
        return self.max_tokens // self.alignment * self.alignment


MicroBatchPlan = tuple[TreePlan, ...]


def plan_microbatches(
    samples: Sequence[SampleSize], dp: int, rules: PackingRules, hidden_size: int
) -> list[list[MicroBatchPlan]]:
    """Assign samples to micro-batches.

    Args:
        samples: all samples of one optimizer update, over all data parallel ranks.
        dp: data parallel size.
        rules: budget and switches.
        hidden_size: of the model, for the cost of a token against that of attention.

    Returns:
        For each data parallel rank its micro-batches, as many on each rank; a micro-batch may be empty.

    Raises:
        UserError: one sample alone is over the budget.
    """
    trees = _build_trees(samples, rules)
    if rules.packing:
        trees = _split_for(trees, samples, rules, dp * rules.min_microbatches)
        bins = _pack(trees, dp, rules, hidden_size)
    else:
        bins = [[tree] for tree in trees]
        bins += [[] for _ in range(-len(bins) % (dp * rules.microbatch_multiple))]
    return _assign(bins, dp, hidden_size)


def count_tokens(
    plan: Sequence[Sequence[MicroBatchPlan]], samples: Sequence[SampleSize], rules: PackingRules
) -> tuple[int, int]:
    """Return the tokens that a plan computes over all data parallel ranks, and how many of them are padding.

    A shared prompt is one; a micro-batch without samples is padding alone.
    """
    computed = used = 0
    for micro in (micro for micro_batches in plan for micro in micro_batches):
        tokens = sum(tree.tokens for tree in micro)
        computed += max(tokens + -tokens % rules.alignment, rules.alignment)
        used += sum(_tokens_of(tree.samples, samples) for tree in micro)
    return computed, computed - used


def _tokens_of(members: Sequence[int], samples: Sequence[SampleSize]) -> int:
    return samples[members[0]].prompt_tokens + sum(samples[i].branch_tokens for i in members)


def _make_tree(members: Sequence[int], samples: Sequence[SampleSize], rules: PackingRules) -> TreePlan:
    tokens = _tokens_of(members, samples)
    longest = samples[members[0]].prompt_tokens + max(samples[i].branch_tokens for i in members)
    return TreePlan(tuple(members), tokens + -tokens % rules.sequence_alignment, longest)


def _build_trees(samples: Sequence[SampleSize], rules: PackingRules) -> list[TreePlan]:
    groups: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.prompt_tokens + sample.branch_tokens > rules.budget:
            raise UserError(
                f"update.max_tokens_per_microbatch: {rules.max_tokens} (aligned: {rules.budget}) is less "
                "than one sequence: "
                f"{sample.prompt_tokens} prompt + {sample.branch_tokens} completion tokens"
            )
        groups[sample.group if rules.share_prompts and rules.packing else index].append(index)
    trees = []
    for members in groups.values():
        open_tree: list[int] = []
        for index in members:
            if open_tree and _make_tree([*open_tree, index], samples, rules).tokens > rules.budget:
                trees.append(_make_tree(open_tree, samples, rules))
                open_tree = []
            open_tree.append(index)
        trees.append(_make_tree(open_tree, samples, rules))
    return trees


def _split_for(
    trees: list[TreePlan], samples: Sequence[SampleSize], rules: PackingRules, wanted: int
) -> list[TreePlan]:
    """Halve the largest trees until there is one for each micro-batch, or nothing is left to halve."""
    if len(trees) >= wanted:
        return trees
    done = [tree for tree in trees if len(tree.samples) == 1]
    heap = [_by_size(tree) for tree in trees if len(tree.samples) > 1]
    heapq.heapify(heap)
    while heap and len(done) + len(heap) < wanted:
        *_, largest = heapq.heappop(heap)
        half = len(largest.samples) // 2
        for part in (largest.samples[:half], largest.samples[half:]):
            tree = _make_tree(part, samples, rules)
            if len(part) > 1:
                heapq.heappush(heap, _by_size(tree))
            else:
                done.append(tree)
    return [*done, *(tree for *_, tree in heap)]


def _by_size(tree: TreePlan) -> tuple[int, int, TreePlan]:
    """Return an entry of a heap whose first is the largest tree; samples of two trees differ."""
    return -tree.tokens, -tree.samples[0], tree


def _pack(trees: list[TreePlan], dp: int, rules: PackingRules, hidden_size: int) -> list[list[TreePlan]]:
    """Fill dp * m bins, heaviest tree first into the cheapest bin that has room, with the smallest m of
    the multiples that works.
    """
    ordered = sorted(trees, key=lambda tree: (-tree.cost(hidden_size), tree.samples))
    total = sum(tree.tokens for tree in trees)
    count = max(1, min(rules.min_microbatches, len(trees) // dp), -(-total // (rules.budget * dp)))
    count += -count % rules.microbatch_multiple
    while True:
        bins = _fill(ordered, dp * count, rules.budget, hidden_size)
        if bins is not None:
            return bins
        # ends at the latest with one tree a bin: no tree is over the budget
        count += rules.microbatch_multiple


def _fill(
    ordered: Sequence[TreePlan], count: int, budget: int, hidden_size: int
) -> list[list[TreePlan]] | None:
    """Put each tree into the cheapest of `count` bins that has room for it; None where one has no room left.

    A bin that is too full for a tree is set aside until a tree comes that it has room for; so a tree costs a
    few steps of a heap, not a look at every bin.
    """
    bins: list[list[TreePlan]] = [[] for _ in range(count)]
    open_bins = [(0.0, number, budget) for number in range(count)]  # cost, bin, tokens left
    set_aside: list[tuple[int, float, int]] = []  # minus tokens left, cost, bin
    for tree in ordered:
        while set_aside and -set_aside[0][0] >= tree.tokens:
            left, cost, number = heapq.heappop(set_aside)
            heapq.heappush(open_bins, (cost, number, -left))
        while open_bins and open_bins[0][2] < tree.tokens:
            cost, number, room = heapq.heappop(open_bins)
            heapq.heappush(set_aside, (-room, cost, number))
        if not open_bins:
            return None
        cost, number, room = open_bins[0]
        bins[number].append(tree)
        heapq.heapreplace(open_bins, (cost + tree.cost(hidden_size), number, room - tree.tokens))
    return bins


def _assign(bins: list[list[TreePlan]], dp: int, hidden_size: int) -> list[list[MicroBatchPlan]]:
    """Deal bins to ranks so that the micro-batches that run at the same time cost alike: sorted, dealt
    back and forth.
    """
    ordered = sorted(bins, key=lambda trees: -sum(tree.cost(hidden_size) for tree in trees))
    ranks: list[list[MicroBatchPlan]] = [[] for _ in range(dp)]
    for start in range(0, len(ordered), dp):
        row = ordered[start : start + dp]
        if (start // dp) % 2:
            row = row[::-1]
        for rank, trees in enumerate(row):
            ranks[rank].append(tuple(trees))
    return ranks
