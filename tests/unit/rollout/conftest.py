"""A rollout pipeline on one rank, with an engine and rewards that do what a test tells them."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from megagrpo.config.load import load_config
from megagrpo.fleet import replica_recovery
from megagrpo.parallel.plain_data import decode, encode
from megagrpo.rollout import generation
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.pipeline import RolloutPipeline
from megagrpo.rollout.prompts import PromptSampler
from megagrpo.types import Completion, Prompt, Reward


class ScriptedEngine:
    """Completions of `length_of(prompt)` tokens under `version`; `before(prompt)` runs first, and may wait
    or raise.
    """

    def __init__(self):
        self.version = 0
        self.asked = []  # (step, prompt id, completion index) of every completion
        self.length_of = lambda prompt: 2
        self.before = lambda prompt: None
        self.aborted = False

    def generate(self, prompts, sampling, completion_indices, on_group=None):
        groups = []
        for position, prompt in enumerate(prompts):
            self.before(prompt)
            self.asked += [(sampling.step, prompt.id, index) for index in completion_indices]
            length = self.length_of(prompt)
            groups.append(
                [
                    Completion.sampled(
                        prompt.id,
                        index,
                        np.arange(length) + index,
                        np.full(length, -0.1 * (index + 1), np.float32),
                        "stop",
                        ((0, self.version),),
                        f"{prompt.id} {index}",
                    )
                    for index in completion_indices
                ]
            )
            on_group(position, groups[-1])
        return groups

    def abort(self):
        self.aborted = True


class ScriptedRewards:
    """The reward is the completion's index; scores at once, in the caller's thread."""

    def submit(self, prompts, completions):
        future = Future()
        future.set_result(
            [
                Reward(float(completion.index), {"index": float(completion.index)})
                for completion in completions
            ]
        )
        return future


class TenPrompts:
    """A source of ten prompts."""

    def __init__(self, config):
        self.config = config.data
        self.prompts = [Prompt(number, str(number), (1, 2)) for number in range(10)]

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, position):
        return self.prompts[position]

    def with_id(self, prompt_id):
        return self.prompts[prompt_id]


@pytest.fixture
def scripted_engine():
    return ScriptedEngine


@pytest.fixture
def scripted_rewards():
    return ScriptedRewards


@pytest.fixture
def engine():
    return ScriptedEngine()


class OneRank:
    rank, world_size = 0, 1


@pytest.fixture
def build_pipeline(one_rank, engine):
    """A function (overrides, prompts=None, note) -> a pipeline of 3 prompts a step, 2 completions each, over
    4 steps.
    """

    def build(*overrides, prompts=None, note=lambda line: None):
        sizes = ["rollout.prompts_per_step=3", "rollout.completions_per_prompt=2", "run.steps=4"]
        config = load_config(
            "examples/quickstart/quickstart.yaml",
            [*sizes, "algorithm.correction.importance=token", *overrides],
        )
        source = TenPrompts(config)
        source.prompts = prompts or source.prompts
        return RolloutPipeline(
            rollout=config.rollout,
            algorithm=config.algorithm,
            num_steps=config.run.steps,
            seed=config.run.seed,
            generator=RolloutGenerator(engine, ScriptedRewards(), OneRank(), [0]),
            sampler=PromptSampler(source, seed=0),
            allowed_changes=config.run.allow_config_changes,
            note=note,
        )

    return build


RANKS = 2


class Ranks:
    """Runs a function in a thread per rank; stands in for the one collective that is used."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=60.0)
        self.values = [None] * RANKS
        self.local = threading.local()

    def all_gather(self, value):
        self.values[self.local.rank] = encode(value)
        self.barrier.wait()
        gathered = [decode(told) for told in self.values]
        self.barrier.wait()
        return gathered

    def run(self, function):
        results = [None] * RANKS

        def call(rank):
            self.local.rank = rank
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        return results


@pytest.fixture
def ranks(monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr(generation, "all_gather_metadata", ranks.all_gather)
    monkeypatch.setattr(generation, "wait_for_all_ranks", ranks.barrier.wait)
    monkeypatch.setattr(replica_recovery, "all_gather_metadata", ranks.all_gather)
    monkeypatch.setattr(
        generation.time, "sleep", lambda seconds: ranks.__dict__.setdefault("slept", []).append(seconds)
    )
    return ranks
