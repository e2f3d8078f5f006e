"""The micro-batch plan keeps its promises for any lengths: budget, same count on every rank, every sample
once.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.errors import UserError
from megagrpo.policy.microbatches import PackingRules, SampleSize, count_tokens, plan_microbatches

HIDDEN = 64
samples = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=40
).map(lambda rows: [SampleSize(group, 1 + 3 * group, length) for group, length in rows])  # fmt: skip
rules = st.builds(
    PackingRules,
    max_tokens=st.integers(48, 120),
    alignment=st.sampled_from([1, 2, 4]),
    packing=st.booleans(),
    share_prompts=st.booleans(),
    min_microbatches=st.integers(1, 4),
)


@settings(max_examples=200, deadline=None)
@given(samples, st.integers(1, 4), rules)
def test_every_sample_is_planned_once_within_the_budget(sizes, dp, packing_rules):
    plan = plan_microbatches(sizes, dp, packing_rules, HIDDEN)
    planned = [index for rank in plan for micro in rank for tree in micro for index in tree.samples]
    assert sorted(planned) == list(range(len(sizes)))
    assert len(plan) == dp and len({len(rank) for rank in plan}) == 1
    for micro in (micro for rank in plan for micro in rank):
        tokens = sum(tree.tokens for tree in micro)
        assert tokens + -tokens % packing_rules.alignment <= packing_rules.max_tokens


@settings(max_examples=100, deadline=None)
@given(samples, st.integers(1, 4), rules)
def test_a_tree_holds_one_group_and_its_prompt_once(sizes, dp, packing_rules):
    for rank in plan_microbatches(sizes, dp, packing_rules, HIDDEN):
        for tree in (tree for micro in rank for tree in micro):
            members = [sizes[index] for index in tree.samples]
            assert len({member.group for member in members}) == 1
            assert tree.tokens == members[0].prompt_tokens + sum(
                member.completion_tokens - 1 for member in members
            )
            if not (packing_rules.packing and packing_rules.share_prompts):
                assert len(members) == 1


def test_shared_prompts_are_counted_once():
    """8 completions of 5 tokens behind a prompt of 20: 20 + 8 * 4 tokens instead of 8 * 24."""
    plan = plan_microbatches([SampleSize(0, 20, 5)] * 8, 1, PackingRules(1000), HIDDEN)
    assert sum(tree.tokens for tree in plan[0][0]) == 52


def test_padding_is_what_alignment_and_empty_micro_batches_add():
    """Prompts of 10 with one completion of 6 and of 3 tokens are 15 and 12 input tokens. Apart, each is
    padded to 16: 5 of 32 are padding; with four ranks two compute 16 tokens of padding alone.
    """
    sizes, rules = [SampleSize(0, 10, 6), SampleSize(1, 10, 3)], PackingRules(64, 16, packing=False)
    assert count_tokens(plan_microbatches(sizes, 2, rules, HIDDEN), sizes, rules) == (32, 5)
    assert count_tokens(plan_microbatches(sizes, 4, rules, HIDDEN), sizes, rules) == (64, 37)


def test_aligned_sequences_are_padding_too():
    """13 tokens in one tree of sequences padded to 8, in a micro-batch padded to 32: 19 of 32."""
    sizes, rules = [SampleSize(0, 10, 4)], PackingRules(64, 32, sequence_alignment=8)
    assert count_tokens(plan_microbatches(sizes, 1, rules, HIDDEN), sizes, rules) == (32, 19)


@settings(max_examples=100, deadline=None)
@given(samples, st.integers(1, 4), rules)
def test_without_padding_all_that_is_computed_are_tokens_of_the_samples(sizes, dp, packing_rules):
    plan = plan_microbatches(sizes, dp, packing_rules, HIDDEN)
    computed, padding = count_tokens(plan, sizes, packing_rules)
    trees = [tree for rank in plan for micro in rank for tree in micro]
    assert computed - padding == sum(tree.tokens for tree in trees)  # sequences are not aligned here
    assert computed % packing_rules.alignment == 0


def test_costs_of_the_ranks_are_balanced():
    sizes = [SampleSize(i, 10, 1 + (37 * i) % 90) for i in range(64)]
    plan = plan_microbatches(sizes, 4, PackingRules(512), HIDDEN)
    costs = [sum(tree.cost(HIDDEN) for micro in rank for tree in micro) for rank in plan]
    assert max(costs) / min(costs) < 1.1


def test_pipeline_gets_its_micro_batches_where_there_are_enough_samples():
    plan = plan_microbatches([SampleSize(0, 20, 5)] * 8, 1, PackingRules(1000, min_microbatches=4), HIDDEN)
    assert len(plan[0]) == 4


def test_ranks_without_samples_get_empty_micro_batches():
    plan = plan_microbatches([SampleSize(0, 3, 1)], 2, PackingRules(16), HIDDEN)
    assert sorted(len(rank[0]) for rank in plan) == [0, 1]


def test_a_sequence_over_the_budget_is_named_with_the_arithmetic():
    with pytest.raises(
        UserError,
        match=r"max_tokens_per_microbatch: 21 \(aligned: 20\).* 16 prompt \+ 5 "
        r"completion tokens",
    ):
        plan_microbatches([SampleSize(0, 16, 6)], 1, PackingRules(21, alignment=4), HIDDEN)


def test_interleaved_schedules_get_a_multiple_of_their_stages():
    """Three trees for two stages: the fourth micro-batch is empty, on every data parallel rank alike."""
    sizes = [SampleSize(group, 20, 5) for group in range(3)]
    for packing in (True, False):
        plan = plan_microbatches(sizes, 1, PackingRules(30, packing=packing, microbatch_multiple=2), HIDDEN)
        assert sorted(len(batch) for batch in plan[0]) == [0, 1, 1, 1]
    plan = plan_microbatches(
        sizes * 2, 2, PackingRules(30, microbatch_multiple=4, share_prompts=False), HIDDEN
    )
    assert [len(rank) for rank in plan] == [4, 4]


def test_sequences_padded_by_themselves_count_with_their_padding():
    plan = plan_microbatches(
        [SampleSize(0, 3, 3), SampleSize(1, 2, 1)],
        1,
        PackingRules(12, alignment=4, sequence_alignment=4),
        HIDDEN,
    )
    assert sorted(tree.tokens for batch in plan[0] for tree in batch) == [4, 8]
