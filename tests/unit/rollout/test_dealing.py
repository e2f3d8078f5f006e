"""Groups are dealt by expected length, the same on every rank; every group goes to exactly one."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megagrpo.rollout.dealing import LengthEstimates, deal_groups
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Prompt, Reward


def rollouts_of(lengths):
    """Prompt id -> completion lengths of its group; every prompt has ten tokens."""
    prompts = [Prompt(prompt_id, "", (1,) * 10) for prompt_id in lengths]
    records = {
        (group, place): CompletionRecord((group, place), 0, length, "stop", Reward(0.0), 0)
        for group, prompt in enumerate(prompts)
        for place, length in enumerate(lengths[prompt.id])
    }
    return StepRollouts(prompts, records, {})


def test_the_long_ones_are_shared_out():
    # Round robin over two ranks gives 100 + 90 and 1 + 2; by length it is 100 + 1 and 90 + 2 + ... the halves
    # differ by 9.
    assert deal_groups([100.0, 1.0, 90.0, 2.0], [0, 1]) == [[0], [1, 2, 3]]


def test_equal_costs_give_equal_counts():
    assert [len(groups) for groups in deal_groups([5.0] * 12, range(4))] == [3, 3, 3, 3]


def test_ranks_of_one_replica_share_its_speed():
    # Two ranks ask one replica, the third has one alone: each replica gets half of the work.
    dealt = deal_groups([1.0] * 8, [0, 0, 1])
    assert [len(groups) for groups in dealt] == [2, 2, 4]


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 7))
def test_every_group_has_one_rank_and_no_rank_more_than_a_group_beyond_its_share(costs, ranks):
    dealt = deal_groups(costs, range(ranks))
    assert sorted(group for groups in dealt for group in groups) == list(range(len(costs)))
    # Graham's bound of list scheduling: whoever has most got its last group when it had at most the mean.
    loads = [sum(costs[group] for group in groups) for groups in dealt]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) + 1e-6


def test_a_prompt_is_judged_by_its_own_past_and_a_new_one_by_its_length():
    lengths = LengthEstimates()
    new = Prompt(9, "", (1,) * 20)
    assert lengths.expected_tokens(new) == 20.0  # nothing seen yet
    lengths.observe(rollouts_of({1: [10, 30], 2: [5, 15]}))
    assert lengths.expected_tokens(Prompt(1, "", (1,))) == 20.0
    # 60 completion tokens came from 4 prompts of 10 tokens
    assert lengths.expected_tokens(new) == 20 * (60 / 40)
    lengths.observe(rollouts_of({1: [40, 40]}))
    assert lengths.expected_tokens(Prompt(1, "", (1,))) == 30.0  # half the old estimate, half the new mean


def test_estimates_survive_a_checkpoint():
    lengths, restored = LengthEstimates(), LengthEstimates()
    lengths.observe(rollouts_of({1: [10, 31], 2: [5]}))
    restored.load_state(json.loads(json.dumps(lengths.state())))
    for prompt in (Prompt(1, "", (1,)), Prompt(2, "", (1,)), Prompt(3, "", (1, 2, 3))):
        assert restored.expected_tokens(prompt) == lengths.expected_tokens(prompt)


def test_only_the_prompts_seen_last_are_kept(monkeypatch):
    monkeypatch.setattr("megagrpo.rollout.dealing.MAX_PROMPTS", 2)
    lengths = LengthEstimates()
    lengths.observe(rollouts_of({1: [50]}))
    lengths.observe(rollouts_of({2: [60]}))
    lengths.observe(rollouts_of({1: [50]}))
    lengths.observe(rollouts_of({3: [10]}))
    assert [lengths.expected_tokens(Prompt(i, "", (1,))) for i in (1, 2, 3)] == [50.0, 1.0, 10.0]
