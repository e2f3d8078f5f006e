"""Engines that fail: what they have finished is kept, the rest goes to others."""

import threading

import pytest

from megagrpo.errors import UserError
from megagrpo.rollout import generation
from megagrpo.rollout.engines.base import EngineError, EngineHealth
from megagrpo.rollout.generation import RolloutFailedError, RolloutGenerator, RolloutRequest
from megagrpo.rollout.replica_states import EngineFailure, ReplicaStates
from megagrpo.types import Prompt, SamplingParams

RANKS = 2


class Ranks:
    """Runs a function in a thread per rank; stands in for the one collective that is used."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=60.0)
        self.values = [None] * RANKS
        self.local = threading.local()

    def all_gather(self, value):
        self.values[self.local.rank] = value
        self.barrier.wait()
        gathered = list(self.values)
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
    monkeypatch.setattr(generation.time, "sleep", lambda seconds: ranks.__dict__.setdefault("slept", []).append(seconds))
    return ranks


@pytest.fixture
def build(ranks, scripted_engine, scripted_rewards):
    """A function -> one generator per rank, each with a replica of its own behind it."""

    def build(is_embedded=False):
        class Groups:
            def __init__(self, rank):
                self.rank, self.world_size = rank, RANKS

        engines = [scripted_engine() for _ in range(RANKS)]
        for engine in engines:
            engine.ready = True
            engine.health = lambda engine=engine: EngineHealth(engine.ready, "serving" if engine.ready else "dead", 0, "it was killed")
        return [RolloutGenerator(engines[rank], scripted_rewards(), Groups(rank), range(RANKS), is_embedded) for rank in range(RANKS)]

    return build


def request():
    return RolloutRequest([Prompt(number, str(number), (1, 2)) for number in range(6)], SamplingParams(8), completions_per_prompt=2)


def tokens(results):
    """Everything that was generated, wherever it lies; every group once."""
    merged = {}
    for rollouts in results:
        assert not merged.keys() & rollouts.local.keys()
        merged |= {key: (c.prompt_id, c.index, c.token_ids.tolist()) for key, c in rollouts.local.items()}
    assert [list(rollouts.records) for rollouts in results] == [sorted(merged)] * RANKS
    return merged


def dies_at(engine, prompt_id, ready):
    def before(prompt):
        if prompt.id == prompt_id:
            engine.ready = ready
            raise EngineError("the server is gone")

    engine.before = before


def test_a_dead_engines_groups_are_generated_by_another_and_its_finished_ones_kept(ranks, build):
    generators = build()
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    dies_at(generators[0].engine, prompt_id=2, ready=False)  # it has 0, 2 and 4: one is finished
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert tokens(results) == whole
    assert sorted(results[0].local) == [(0, 0), (0, 1)]
    assert [generator.replicas.lost for generator in generators] == [{0: "the server is gone"}] * RANKS
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert results[0].local == {} and tokens(results) == whole  # it gets no prompts until it is back


def test_an_engine_that_still_serves_is_tried_again_after_growing_pauses(ranks, build):
    generators, failures = build(), []
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))

    def twice(prompt):
        if prompt.id in (2, 4) and len(failures) < 2:
            failures.append(prompt.id)
            raise EngineError("timed out")

    for generator in generators:
        generator.engine.before = twice
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert tokens(results) == whole and len(failures) == 2
    assert all(generator.replicas.lost == {} for generator in generators)
    assert sum(pause > 0 for pause in ranks.slept) >= RANKS


def test_the_run_ends_on_all_ranks_when_no_engine_is_left(ranks, build):
    generators = build()
    for rank, generator in enumerate(generators):
        dies_at(generator.engine, prompt_id=2 + rank, ready=False)
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    message = "no rollout engine is left: replica 0: the server is gone; replica 1: the server is gone"
    assert [type(error) for error in errors] == [RolloutFailedError] * RANKS and {str(error) for error in errors} == {message}


def test_an_embedded_engine_that_fails_ends_the_run_at_once(ranks, build):
    """The others hold the same weights: they would fail too, and hide the cause."""
    generators = build(is_embedded=True)
    dies_at(generators[1].engine, prompt_id=3, ready=True)
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    assert {str(error) for error in errors} == {"rank 1: EngineError: the server is gone"}


def test_a_users_mistake_is_told_as_one_by_every_rank(ranks, build):
    generators = build()

    def refuse(prompt):
        raise UserError("prompt 3: has no tokens")

    generators[1].engine.before = refuse
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    assert [type(error) for error in errors] == [UserError] * RANKS and {str(error) for error in errors} == {"prompt 3: has no tokens"}


def test_a_replica_that_fails_three_times_in_a_row_is_lost():
    states, failure = ReplicaStates([0, 0, 1]), EngineFailure("timed out", is_ready=True)
    assert states.take([failure, None, None]) == 0.5
    assert states.take([failure, failure, None]) == 1.0 and states.lost == {}
    states.take([None, None, None])  # a good round in between
    assert states.take([None, failure, None]) == 0.5
    states.take([None, failure, None])
    states.take([None, failure, None])
    assert states.lost == {0: "timed out"} and states.is_any_left
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [0, 0, 4]
    states.find(0)
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [1, 1, 2]
