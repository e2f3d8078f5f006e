"""Engines that fail: what they have finished is kept, the rest goes to others, and a lost one comes back with the next weights."""

import threading

import pytest

from megagrpo.errors import UserError
from megagrpo.rollout import generation, recovery
from megagrpo.rollout.engines.base import EngineError, EngineHealth
from megagrpo.rollout.generation import RolloutFailedError, RolloutGenerator, RolloutRequest
from megagrpo.rollout.recovery import RecoveringPublisher, ReplicaRecovery
from megagrpo.rollout.replica_states import EngineFailure, ReplicaStates
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.publisher import PublishStats

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
    monkeypatch.setattr(recovery, "all_gather_metadata", ranks.all_gather)
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


# ---- recovery


class Restartable:
    """What recovery needs of an engine: it is dead until it is restarted."""

    def __init__(self, state="serving", error=None):
        self.state, self.error, self.restarts = state, error, 0
        self.may_start = threading.Event()

    def health(self):
        return EngineHealth(self.state == "serving", self.state, None, "killed by SIGKILL" if self.state == "dead" else "")

    def restart(self):
        self.restarts += 1
        assert self.may_start.wait(60.0)
        if self.error:
            raise EngineError(self.error)
        self.state = "empty"


def recoveries(*engines):
    return [ReplicaRecovery(engine, ReplicaStates(range(RANKS)), owners=range(RANKS), rank=rank) for rank, engine in enumerate(engines)]


def test_a_lost_replica_starts_while_the_others_go_on_and_comes_back_with_the_next_weights(ranks):
    dead, alive = Restartable("dead"), Restartable()
    parts = recoveries(dead, alive)
    assert ranks.run(lambda rank: parts[rank].prepare_publish()) == [[1], [1]]  # its start has only begun
    ranks.run(lambda rank: parts[rank].published())
    assert [part.states.lost for part in parts] == [{0: "killed by SIGKILL"}] * RANKS
    dead.may_start.set()
    parts[0]._start.wait()
    assert ranks.run(lambda rank: parts[rank].prepare_publish()) == [[0, 1], [0, 1]]
    assert [part.states.lost for part in parts] == [{0: "killed by SIGKILL"}] * RANKS  # not before it holds the weights
    ranks.run(lambda rank: parts[rank].published())
    assert [part.states.lost for part in parts] == [{}, {}] and dead.restarts == 1 and alive.restarts == 0


def test_where_nothing_is_left_a_publish_waits_for_a_start(ranks):
    engines = [Restartable("dead"), Restartable("dead", error="it died more than engine.max_restarts = 0 times")]
    for engine in engines:
        engine.may_start.set()
    parts = recoveries(*engines)
    usable = ranks.run(lambda rank: parts[rank].prepare_publish())
    assert usable == [[0], [0]]
    assert "max_restarts" in parts[0].states.lost[1] and parts[0].states.lost == parts[1].states.lost


def test_where_nothing_is_left_and_nothing_starts_nobody_takes_weights(ranks):
    engines = [Restartable("dead", error="no more restarts"), Restartable("dead", error="no more restarts")]
    for engine in engines:
        engine.may_start.set()
    parts = recoveries(*engines)
    assert ranks.run(lambda rank: parts[rank].prepare_publish()) == [[], []]
    assert [part.states.lost[1] for part in parts] == ["killed by SIGKILL; no more restarts"] * RANKS


def test_the_rollout_after_it_ends_the_run_on_all_ranks(ranks, build):
    generators = build()
    for generator in generators:
        generator.replicas.lost.update({0: "killed by SIGKILL", 1: "no more restarts"})
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    assert {type(error) for error in errors} == {RolloutFailedError}


def test_a_publish_goes_to_those_who_are_there_and_tells_who_is_not(ranks):
    dead, alive = Restartable("dead"), Restartable()
    parts = recoveries(dead, alive)
    published = []

    class Recorded:
        exporter = None

        def publish(self, version, replicas):
            published.append((version, replicas))
            return PublishStats(version, 1, 2, {"publish/buckets": 3}, ("from below",))

    publishers = [RecoveringPublisher(Recorded(), part) for part in parts]
    stats = ranks.run(lambda rank: publishers[rank].publish(4))
    assert published == [(4, [1])] * RANKS
    assert stats[0].metrics == {"publish/buckets": 3, "rollout/lost_replicas": 1}
    assert stats[0].notes == ("from below", "warning: weight version 4: engine replica 0 is lost: killed by SIGKILL")
    stats = ranks.run(lambda rank: publishers[rank].publish(5))
    assert stats[0].notes == ("from below",)  # told once
    dead.may_start.set()
    parts[0]._start.wait()
    stats = ranks.run(lambda rank: publishers[rank].publish(6))
    assert published[4:] == [(6, [0, 1])] * RANKS and stats[0].metrics["rollout/lost_replicas"] == 0
    assert stats[1].notes[-1] == "weight version 6: engine replica 0 was started anew and generates again"
