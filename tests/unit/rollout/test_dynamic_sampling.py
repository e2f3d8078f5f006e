"""Dynamic sampling: groups without a signal are replaced, a bounded number of times, and counted."""

import numpy as np
import pytest

from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.rollout.dynamic_sampling import collect_groups, count_outcomes
from megagrpo.rollout.rollout_metrics import compute_rollout_metrics
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Completion, Prompt, Reward


def rollouts_with(rewards, first_prompt=0, cut=()):
    """One group per row of rewards, two tokens per completion."""
    prompts = [Prompt(first_prompt + group, "", (1,)) for group in range(len(rewards))]
    records, local = {}, {}
    for group, row in enumerate(rewards):
        for place, reward in enumerate(row):
            key = (group, place)
            finish = "length" if key in cut else "stop"
            records[key] = CompletionRecord(key, 0, 2, finish, Reward(reward, {"r": reward}), 0)
            local[key] = Completion.sampled(
                prompts[group].id, place, np.zeros(2, int), np.zeros(2, np.float32), "stop", ((0, 0),), ""
            )
    return StepRollouts(prompts, records, local, len(rewards[0]))


def run(rounds, wanted, mask=False, cut=(), **config):
    asked = []

    def generate(count, refill):
        asked.append((count, refill))
        return rollouts_with(rounds[refill][:count], 100 * refill, cut if refill == 0 else ())

    kept, counts = collect_groups(
        generate, wanted, AlgorithmConfig(dynamic_sampling=config, overlong={"mask": mask})
    )
    return kept, counts, asked


def test_off_keeps_groups_without_a_signal():
    kept, counts, asked = run([[[1, 1], [0, 1]]], 2, enabled=False)
    assert len(kept.prompts) == 2 and counts.dropped_groups == 0 and asked == [(2, 0)]


def test_only_what_is_missing_is_drawn_again():
    kept, counts, asked = run([[[1, 1], [0, 1], [0, 0]], [[0, 1], [1, 1]], [[1, 0]]], 3, enabled=True)
    assert asked == [(3, 0), (2, 1), (1, 2)]
    assert [prompt.id for prompt in kept.prompts] == [1, 100, 200]
    assert sorted(kept.records) == [(group, place) for group in range(3) for place in range(2)]
    assert all(kept.records[key].key == key and key in kept.local for key in kept.records)
    assert (counts.generated_groups, counts.dropped_groups, counts.refills, counts.generated_tokens) == (
        6,
        3,
        2,
        24,
    )


def test_refills_end_at_the_bound_with_what_there_is():
    equal = [[1, 1], [1, 1]]
    kept, counts, asked = run([equal, equal, equal], 2, enabled=True, max_refills=2)
    assert len(asked) == 3 and kept.prompts == [] and counts.refills == 2 and counts.dropped_groups == 6


def test_a_completion_that_overlong_masking_takes_out_makes_no_group_informative():
    """It is not in the group's statistics nor in the loss, so nothing of the group would train."""
    rounds, cut = [[[1, 0], [0, 1]], [[1, 0]]], {(0, 0)}
    masked, counts, _ = run(rounds, 2, mask=True, cut=cut, enabled=True)
    assert [prompt.id for prompt in masked.prompts] == [1, 100] and counts.dropped_groups == 1
    unmasked, counts, _ = run(rounds, 2, mask=False, cut=cut, enabled=True)
    assert [prompt.id for prompt in unmasked.prompts] == [0, 1] and counts.dropped_groups == 0


def test_the_mean_reward_is_that_of_all_that_was_sampled_and_never_vanishes():
    """Kept groups alone always look half solved; of 12 samples here 3 are right."""
    rounds = [[[0, 0], [0, 1], [0, 0]], [[0, 0], [1, 0]], [[0, 1]]]
    kept, counts, _ = run(rounds, 3, enabled=True)
    metrics = compute_rollout_metrics(kept, counts, 0)
    assert metrics["reward/mean"] == 3 / 12 and metrics["reward/r"] == 3 / 12
    assert metrics["update/reward_mean"] == 3 / 6
    kept, counts, _ = run([[[1, 1]], [[0, 0]]], 1, enabled=True, max_refills=1)
    metrics = compute_rollout_metrics(kept, counts, 0)
    assert metrics["reward/mean"] == 0.5 and metrics["rollout/completion_tokens"] == 2
    assert "update/reward_mean" not in metrics


def test_groups_are_counted_by_how_they_came_out_over_all_rounds():
    rounds = [[[1, 1], [0, 1], [0, 0]], [[0, 1], [1, 1]], [[1, 0]]]
    _, counts, _ = run(rounds, 3, enabled=True)
    assert (counts.outcomes.signal, counts.outcomes.solved, counts.outcomes.repeated) == (3, 2, 0)
    metrics = compute_rollout_metrics(rollouts_with([[0, 1]]), counts, 0)
    assert (metrics["rollout/groups"], metrics["rollout/signal_groups"]) == (6, 3)
    # 12 rewards with 7 ones: the standard deviation of a coin with p = 7/12
    assert metrics["reward/std"] == pytest.approx((7 / 12 * 5 / 12) ** 0.5)


def test_a_prompt_that_comes_twice_in_a_step_is_counted():
    rollouts = rollouts_with([[0, 1], [1, 0], [0, 0]])
    rollouts.prompts[2] = rollouts.prompts[0]
    assert count_outcomes(rollouts).repeated == 1
