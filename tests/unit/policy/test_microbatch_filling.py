"""The heaps that fill micro-batches: what a look at every bin would choose, in a few steps for each tree."""

import random

import pytest

from megagrpo.policy import microbatches
from megagrpo.policy.microbatches import PackingRules, SampleSize, TreePlan, plan_microbatches

HIDDEN = 64


def make_trees(seed, count=60):
    random_numbers = random.Random(seed)
    trees = []
    for number in range(count):
        tokens = random_numbers.randint(1, 100)
        trees.append(TreePlan((number,), tokens, random_numbers.randint(1, 2000)))
    return sorted(trees, key=lambda tree: (-tree.cost(HIDDEN), tree.samples))


def fill_by_looking_at_every_bin(ordered, count, budget):
    bins, costs, tokens = [[] for _ in range(count)], [0.0] * count, [0] * count
    for tree in ordered:
        room = [number for number in range(count) if tokens[number] + tree.tokens <= budget]
        if not room:
            return None
        target = min(room, key=lambda number: (costs[number], number))
        bins[target].append(tree)
        costs[target] += tree.cost(HIDDEN)
        tokens[target] += tree.tokens
    return bins


@pytest.mark.parametrize("count", [1, 29, 31, 33, 40, 60])
@pytest.mark.parametrize("seed", range(5))
def test_each_tree_goes_into_the_cheapest_bin_with_room(seed, count):
    """Costs that do not follow the tokens, so that full bins come back into play; some counts do not fit."""
    trees = make_trees(seed)
    assert microbatches._fill(trees, count, 110, HIDDEN) == fill_by_looking_at_every_bin(trees, count, 110)


def test_the_cases_above_both_fit_and_do_not():
    fits = {
        microbatches._fill(make_trees(seed), n, 110, HIDDEN) is not None
        for seed in range(5)
        for n in (29, 60)
    }
    assert fits == {True, False}


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_plan_for_many_replicas_takes_a_few_steps_for_each_sample(share_prompts, monkeypatch):
    """8,192 samples over 128 replicas; a look at every bin for each of them would be a million steps."""
    random_numbers, steps = random.Random(1), 0
    samples = []
    for group in range(512):
        prompt = random_numbers.randint(20, 400)
        samples += [SampleSize(group, prompt, random_numbers.randint(2, 2000)) for _ in range(16)]

    def counted(function):
        def call(*arguments):
            nonlocal steps
            steps += 1
            return function(*arguments)

        return call

    for name in ("heappush", "heappop", "heapreplace"):
        monkeypatch.setattr(microbatches.heapq, name, counted(getattr(microbatches.heapq, name)))
    rules = PackingRules(8192, alignment=16, share_prompts=share_prompts)
    plan = plan_microbatches(samples, 128, rules, 4096)
    assert sorted(i for rank in plan for micro in rank for tree in micro for i in tree.samples) == list(
        range(8192)
    )
    assert steps < 8 * len(samples)
