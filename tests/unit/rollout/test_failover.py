"""Engines that fail: what they have finished is kept, the rest goes to others, and a lost one comes back with the next weights."""

import contextlib
import threading

import pytest

from megagrpo.errors import StopRequested, UserError
from megagrpo.rollout import generation, recovery
from megagrpo.rollout.engines.base import EngineError, EngineHealth
from megagrpo.rollout.generation import RolloutFailedError, RolloutGenerator, RolloutRequest
from megagrpo.rollout.recovery import RecoveringPublisher, ReplicaRecovery
from megagrpo.rollout.replica_states import EngineFailure, ReplicaStates
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.publisher import PublishError, PublishStats

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
    assert states.take([failure, None, None], served=[1, 2]) == 0.5
    assert states.take([failure, failure, None], served=[2]) == 1.0 and states.lost == {}
    states.take([None, None, None], served=[2])  # it was not asked, so it has not served
    states.take([None, None, None], served=[1, 2])  # a good round in between
    assert states.take([None, failure, None], served=[0]) == 0.5
    states.take([None, failure, None], served=[])
    states.take([None, failure, None], served=[])
    assert states.lost == {0: "timed out"} and states.is_any_left
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [0, 0, 4]
    states.find(0)
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [1, 1, 2]


def test_what_a_replica_failed_on_goes_to_others_and_back_to_it_only_where_there_are_none():
    states, failure = ReplicaStates([0, 1]), EngineFailure("timed out", is_ready=True)
    states.take([failure, None], served=[1])
    assert states.deal([1.0] * 4, is_retry=True) == [[], [0, 1, 2, 3]]
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [2, 2]  # the next request is nobody's retry
    states.take([None, failure], served=[0])  # the first one has done well
    assert states.deal([1.0] * 4, is_retry=True) == [[0, 1, 2, 3], []]
    states.take([failure, failure], served=[])
    assert [len(groups) for groups in states.deal([1.0] * 4, is_retry=True)] == [2, 2]


def test_what_fails_a_step_ahead_is_generated_by_others_before_the_weights_change(ranks, build):
    """So it comes from the weights that the rest of its step comes from, and a checkpoint holds all of it."""
    generators = build()
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    dies_at(generators[0].engine, prompt_id=2, ready=False)
    settled = ranks.run(lambda rank: generators[rank].settle(generators[rank].start(request())))
    assert sum(len(pending.outcome().completions) for pending in settled) == len(whole)
    for generator in generators:
        generator.engine.version = 1  # published
    results = ranks.run(lambda rank: generators[rank].finish(settled[rank]))
    assert tokens(results) == whole
    assert {record.weight_version for record in results[0].records.values()} == {0}
    assert [generator.replicas.lost for generator in generators] == [{0: "the server is gone"}] * RANKS


def test_what_nobody_is_left_for_is_generated_after_the_publish_that_brings_an_engine_back(ranks, build):
    generators = build()
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    for generator, prompt_id in zip(generators, (2, 3), strict=True):
        dies_at(generator.engine, prompt_id, ready=False)
    settled = ranks.run(lambda rank: generators[rank].settle(generators[rank].start(request())))
    assert 0 < sum(len(pending.outcome().completions) for pending in settled) < len(whole)
    for generator in generators:
        generator.engine.before, generator.engine.ready, generator.engine.version = lambda prompt: None, True, 1
        generator.replicas.find(0)
    results = ranks.run(lambda rank: generators[rank].finish(settled[rank]))
    assert tokens(results) == whole
    assert {record.weight_version for record in results[0].records.values()} == {0, 1}


def test_a_failure_from_before_a_replica_was_found_again_is_no_news():
    """A step ahead is generated before a publish that brings a lost replica back, and is gathered after it."""
    states = ReplicaStates([0])
    old = EngineFailure("killed by SIGKILL", is_ready=False, life=states.life(0))
    states.lost[0] = "killed by SIGKILL"
    states.find(0)
    assert states.take([old], served=[]) == 0.0 and states.lost == {}
    states.take([EngineFailure("killed again", is_ready=False, life=states.life(0))], served=[])
    assert states.lost == {0: "killed again"}


def test_groups_are_generated_again_once_a_lost_engine_is_back(ranks, build):
    """No replica is left, so the ranks have one brought back before they ask again; the completions are the same."""
    generators, revived = build(), []
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    for rank, generator in enumerate(generators):
        dies_at(generator.engine, prompt_id=2 + rank, ready=False)

        def revive(rank=rank, generator=generator):
            revived.append(rank)
            generator.engine.before, generator.engine.ready = lambda prompt: None, True
            generator.replicas.find(0)
            return True

        generator.revive = revive
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert tokens(results) == whole and sorted(revived) == [0, 1]
    assert [generator.replicas.lost for generator in generators] == [{1: "the server is gone"}] * RANKS


# ---- recovery


class Restartable:
    """What recovery needs of an engine: it is dead until it is restarted, which fails with `errors` first."""

    address = "http://127.0.0.1:1"

    def __init__(self, state="serving", *errors):
        self.state, self.errors, self.restarts, self.forgot = state, list(errors), 0, 0
        self.may_start = threading.Event()

    def health(self):
        return EngineHealth(self.state == "serving", self.state, None, "killed by SIGKILL" if self.state == "dead" else "")

    def restart(self, address=None):
        self.restarts += 1
        assert self.may_start.wait(60.0)
        if self.errors:
            raise self.errors.pop(0)
        self.state = "empty"

    def forget_weights(self):
        self.forgot += 1


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
    engines = [Restartable("dead"), Restartable("dead", EngineError("engine.max_restarts = 0 are used up"))]
    for engine in engines:
        engine.may_start.set()
    parts = recoveries(*engines)
    usable = ranks.run(lambda rank: parts[rank].prepare_publish())
    assert usable == [[0], [0]]
    assert "max_restarts" in parts[0].states.lost[1] and parts[0].states.lost == parts[1].states.lost


def test_where_nothing_is_left_and_nothing_starts_nobody_takes_weights(ranks):
    engines = [Restartable("dead", EngineError("no more restarts")) for _ in range(RANKS)]
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


def test_a_server_that_does_not_come_up_is_started_again_until_restarts_are_used_up(ranks):
    unlucky = Restartable("dead", UserError("no port"), UserError("no memory"))
    hopeless = Restartable("dead", UserError("no memory"), EngineError("restarts are used up"))
    for engine in (unlucky, hopeless):
        engine.may_start.set()
    parts = recoveries(unlucky, hopeless)
    assert ranks.run(lambda rank: parts[rank].prepare_publish()) == [[0], [0]]
    assert unlucky.restarts == 3 and parts[0].states.lost[1] == "killed by SIGKILL; restarts are used up"


class Publishes:
    """A publisher that notes what it is asked for, and dies as a scripted engine does."""

    exporter = None

    def __init__(self, engines, ranks):
        self.engines, self.ranks, self.asked, self.deaths = engines, ranks, [], {}

    def publish(self, version, replicas):
        self.asked.append((version, tuple(replicas)))
        mine = self.deaths.pop((version, self.ranks.local.rank), None)
        if mine:
            self.engines[self.ranks.local.rank].state = mine
        if any(told for told in self.ranks.all_gather(mine)):
            raise PublishError(f"weight version {version}: bucket 3: the server is gone")
        return PublishStats(version, 1, 2)


@pytest.fixture
def publishes(ranks):
    """A function (engines) -> (their publishers by rank, what is below them)."""

    def build(*engines):
        below = Publishes(engines, ranks)
        return [RecoveringPublisher(below, part) for part in recoveries(*engines)], below

    return build


def test_a_replica_that_dies_in_a_publish_is_left_out_and_the_others_are_given_everything_again(ranks, publishes):
    engines = [Restartable(), Restartable()]
    publishers, below = publishes(*engines)
    below.deaths[4, 1] = "dead"
    stats = ranks.run(lambda rank: publishers[rank].publish(4))
    assert below.asked == [(4, (0, 1))] * RANKS + [(4, (0,))] * RANKS
    assert [engine.forgot for engine in engines] == [1, 0]
    assert stats[0].notes == ("warning: weight version 4: engine replica 1 is lost: killed by SIGKILL",)
    engines[1].may_start.set()
    publishers[1].recovery._start.wait()
    below.deaths[5, 1] = "dead"  # once more, when it has just been started anew
    stats = ranks.run(lambda rank: publishers[rank].publish(5))
    assert below.asked[4:] == [(5, (0, 1))] * RANKS + [(5, (0,))] * RANKS
    publishers[1].recovery._start.wait()
    stats = ranks.run(lambda rank: publishers[rank].publish(6))
    assert below.asked[-1] == (6, (0, 1)) and engines[1].restarts == 2
    assert stats[1].metrics["rollout/lost_replicas"] == 0


def test_the_only_replica_that_dies_in_a_publish_is_started_anew_and_given_it(ranks, publishes):
    engines = [Restartable(), Restartable()]
    for engine in engines:
        engine.may_start.set()
    publishers, below = publishes(*engines)
    below.deaths = {(4, 0): "dead", (4, 1): "dead"}
    stats = ranks.run(lambda rank: publishers[rank].publish(4))
    assert below.asked[0] == (4, (0, 1)) and below.asked[-1][0] == 4
    assert "weight version 4: engine replica" in stats[0].notes[-1] and "was started anew" in stats[0].notes[-1]


def test_a_publish_that_fails_with_all_engines_alive_ends_the_run(ranks, publishes):
    """Weights that an engine refuses, or computes something else with, are no matter of restarts."""
    engines = [Restartable(), Restartable()]
    publishers, below = publishes(*engines)
    below.deaths[4, 1] = "serving"
    errors = ranks.run(lambda rank: publishers[rank].publish(4))
    assert [type(error) for error in errors] == [PublishError] * RANKS and [engine.forgot for engine in engines] == [0, 0]


def test_a_revived_replica_gets_the_newest_version_and_the_log_says_so_with_the_next_publish(ranks, publishes):
    engines = [Restartable("serving", EngineError("no more restarts")), Restartable()]
    publishers, below = publishes(*engines)
    ranks.run(lambda rank: publishers[rank].publish(7))
    for publisher, engine in zip(publishers, engines, strict=True):
        engine.state = "dead"
        engine.may_start.set()
        publisher.recovery.states.lost.update({0: "silent", 1: "silent"})
    assert ranks.run(lambda rank: publishers[rank].revive()) == [True, True]
    assert below.asked[-1] == (7, (1,))
    notes = ranks.run(lambda rank: publishers[rank].publish(8))[0].notes
    assert "warning: weight version 7: engine replica 1 is lost: silent" in notes
    assert "weight version 7: engine replica 1 was started anew and generates again" in notes
    engines[1].state = "dead"
    engines[1].errors.append(EngineError("no more restarts"))
    assert ranks.run(lambda rank: publishers[rank].revive()) == [False, False]


def test_nobody_waits_for_a_start_once_the_run_is_to_stop(ranks):
    """One rank was told; all give up alike, and what they wait in is left again."""
    engines = [Restartable("dead"), Restartable("dead")]  # may_start is never set
    parts, waiting = recoveries(*engines), []
    stopping = threading.Event()
    parts[1]._is_stopping = stopping.is_set

    @contextlib.contextmanager
    def wait():
        waiting.append("in")
        stopping.set()
        yield
        waiting.append("out")

    for part in parts:
        part.waiting = wait
    publishers = [RecoveringPublisher(Publishes(engines, ranks), part) for part in parts]
    assert [type(error) for error in ranks.run(lambda rank: publishers[rank].revive())] == [StopRequested] * RANKS
    assert sorted(waiting) == ["in"] * RANKS + ["out"] * RANKS
    for engine in engines:
        engine.may_start.set()


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
