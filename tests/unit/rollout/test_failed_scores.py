"""Failed scores are counted, told, and stop the run where they are all there is."""

import pytest

from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import UserError
from megagrpo.rollout.dynamic_sampling import collect_groups
from megagrpo.rollout.failed_scores import count_scores, failed_fractions, mean_parts
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Prompt, Reward

TIMEOUT = Reward(0.0, {"math": 0.0}, "timeout", "math: took over 10 s")
CRASH = Reward(0.0, {"math": 0.0}, "crash", "math: the process ended with signal 11")


def rollouts(*groups: list[Reward]) -> StepRollouts:
    records = {
        (group, place): CompletionRecord((group, place), 0, 3, "stop", reward, 0)
        for group, rewards in enumerate(groups)
        for place, reward in enumerate(rewards)
    }
    prompts = [Prompt(number, "q", (1,)) for number in range(len(groups))]
    return StepRollouts(prompts, records, {}, len(groups[0]))


def right(value: float) -> Reward:
    return Reward(value, {"math": value})


def test_failures_are_counted_by_outcome_with_the_first_ones_cause():
    counts = count_scores(rollouts([right(1.0), TIMEOUT], [CRASH, TIMEOUT]))
    assert failed_fractions("reward", counts) == {
        "reward/failed_fraction": 0.75,
        "reward/failed_fraction/timeout": 0.5,
        "reward/failed_fraction/crash": 0.25,
    }
    assert counts.describe() == (
        "3 of 4 completions could not be scored (crash 1, timeout 2); first: timeout: math: took over 10 s"
    )


@pytest.mark.parametrize("enabled", [False, True])
def test_a_step_without_any_score_stops_the_run_with_the_first_cause(enabled):
    with pytest.raises(UserError, match=r"scorer outage: the step: 4 of 4 .*timeout: math: took over 10 s"):
        collect_groups(
            lambda count, refill: rollouts([TIMEOUT, TIMEOUT], [CRASH, CRASH]),
            2,
            AlgorithmConfig(dynamic_sampling={"enabled": enabled}),
        )


def test_dynamic_sampling_counts_the_failures_of_groups_that_it_drops():
    rounds = [rollouts([TIMEOUT, TIMEOUT], [right(0.0), right(1.0)]), rollouts([right(1.0), right(0.0)])]
    kept, counts = collect_groups(
        lambda count, refill: rounds[refill], 2, AlgorithmConfig(dynamic_sampling={"enabled": True})
    )
    assert len(kept.prompts) == 2
    assert (counts.scores.failed, counts.scores.total) == (2, 6)


def test_a_reward_without_an_opinion_is_left_out_of_its_mean_and_its_parts_are_averaged():
    rewards = [
        Reward(1.0, {"math": 1.0, "style": None}),
        Reward(2.0, {"math": 0.0, "style": 2.0}, subparts={"style/tone": 0.5}),
    ]
    assert mean_parts(rewards) == {"reward/math": 0.5, "reward/style": 2.0, "reward/style/tone": 0.5}
