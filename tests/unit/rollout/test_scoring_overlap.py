"""Scores are made while other groups are generated: the slowest completion of a step keeps no reward
worker waiting.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from megagrpo.engines.base import EngineError, EngineHealth
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest
from megagrpo.rollout.share_progress import ShareProgress
from megagrpo.types import Prompt, Reward, SamplingParams

WAIT_SECONDS = 30.0


class OneRank:
    rank, world_size = 0, 1


class Workers:
    """Scores in threads of their own; `scored` counts the groups that are done."""

    def __init__(self):
        self.scored = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(2)

    def submit(self, prompts, completions):
        def score():
            rewards = [
                Reward(float(completion.index), {"index": float(completion.index)})
                for completion in completions
            ]
            self.scored.release()
            return rewards

        return self._pool.submit(score)


def test_a_straggler_does_not_block_scoring(one_rank, engine):
    """The engine goes on with the last prompt only when the rewards of all others are there."""
    workers = Workers()

    def before(prompt):
        if prompt.id == 3:
            assert all(workers.scored.acquire(timeout=WAIT_SECONDS) for _ in range(3)), (
                "nothing is scored before the last group ends"
            )

    engine.before = before
    prompts = [Prompt(number, str(number), (1, 2)) for number in range(4)]
    rollouts = RolloutGenerator(engine, workers, OneRank(), [0]).generate(
        RolloutRequest(prompts, SamplingParams(8), 2)
    )
    assert sorted(rollouts.records) == [(group, place) for group in range(4) for place in range(2)]
    assert [record.reward.value for record in rollouts.records.values()] == [0.0, 1.0] * 4


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5])
def test_a_bad_log_prob_is_told_by_prompt_and_completion(one_rank, engine, logprob):
    """Not by its place in a micro-batch, which the update would find."""
    sample = engine.generate

    def generate(prompts, sampling, completion_indices, on_group):
        def spoil(position, group):
            if prompts[position].id == 1:
                group[1].logprobs[1] = logprob
            on_group(position, group)

        return sample(prompts, sampling, completion_indices, spoil)

    engine.generate = generate
    prompts = [Prompt(number, str(number), (1, 2)) for number in range(2)]
    generator = RolloutGenerator(engine, Workers(), OneRank(), [0])
    with pytest.raises(Exception, match=f"prompt 1: completion 1: the log-prob of token 1 is {logprob}"):
        generator.generate(RolloutRequest(prompts, SamplingParams(8), 2))


def test_the_text_that_rewards_have_seen_is_the_one_that_is_kept(one_rank, engine):
    """`completions/` is written from what is kept: it must show why a completion has its reward."""
    seen = []

    class Reading(Workers):
        def submit(self, prompts, completions):
            seen.extend(completion.text for completion in completions)
            return super().submit(prompts, completions)

    generator = RolloutGenerator(
        engine, Reading(), OneRank(), [0], read_text=lambda completion: f"<think>{completion.index}"
    )
    prompts = [Prompt(number, str(number), (1, 2)) for number in range(2)]
    rollouts = generator.generate(RolloutRequest(prompts, SamplingParams(8), 2))
    kept = [completion.text for _, completion, _ in rollouts.samples()]
    assert kept == seen == ["<think>0", "<think>1"] * 2


def test_a_failing_group_leaves_the_scores_of_those_before_it(one_rank, engine):
    """What is scored when an engine fails is kept, also where nobody takes over."""
    engine.health = lambda: EngineHealth(False, "dead", None, "killed")
    engine.before = lambda prompt: (
        (_ for _ in ()).throw(EngineError("the server is gone")) if prompt.id == 2 else None
    )
    generator = RolloutGenerator(engine, Workers(), OneRank(), [0], is_embedded=False)
    prompts = [Prompt(number, str(number), (1, 2)) for number in range(4)]
    share = generator.settle(generator.start(RolloutRequest(prompts, SamplingParams(8), 2))).outcome()
    assert sorted(share.rewards) == sorted(share.completions) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_who_watches_a_rollout_is_told_of_completions_and_scores_as_they_come():
    told = []
    progress = ShareProgress(lambda *count: told.append(count), num_groups=2, completions_per_prompt=3)
    scores = [Future(), Future()]
    completion = SimpleNamespace(token_ids=[1, 2, 3, 4])
    progress.completed([completion] * 3, scores[:1])
    scores[0].set_result([])
    progress.scored(scores)
    assert told == [
        ("completions", 0, 6),
        ("tok", 0, None),
        ("scored", 0, 6),
        ("completions", 3, 6),
        ("tok", 12, None),
        ("scored", 0, 6),
        ("scored", 3, 6),
    ]
