"""Lost engines come back with the next weights, and a publish goes to those that are there."""

import contextlib
import threading

import pytest

from megagrpo.engines.base import EngineError, EngineHealth
from megagrpo.errors import StopRequested, UserError
from megagrpo.fleet.recovering_publisher import RecoveringPublisher
from megagrpo.fleet.replica_recovery import ReplicaRecovery
from megagrpo.rollout.dealing import ReplicaStates
from megagrpo.weights.publisher import PublishError, PublishStats

RANKS = 2


class Restartable:
    """What recovery needs of an engine: it is dead until it is restarted, which fails with `errors` first."""

    address = "http://127.0.0.1:1"

    def __init__(self, state="serving", *errors):
        self.state, self.errors, self.restarts, self.forgot = state, list(errors), 0, 0
        self.may_start = threading.Event()

    def health(self):
        return EngineHealth(
            self.state == "serving", self.state, None, "killed by SIGKILL" if self.state == "dead" else ""
        )

    def restart(self, address=None):
        self.restarts += 1
        assert self.may_start.wait(60.0)
        if self.errors:
            raise self.errors.pop(0)
        self.state = "empty"

    def forget_weights(self):
        self.forgot += 1


def recoveries(*engines):
    return [
        ReplicaRecovery(engine, ReplicaStates(range(RANKS)), owners=range(RANKS), rank=rank)
        for rank, engine in enumerate(engines)
    ]


def test_a_lost_replica_starts_while_the_others_go_on_and_comes_back_with_the_next_weights(ranks):
    dead, alive = Restartable("dead"), Restartable()
    parts = recoveries(dead, alive)
    assert ranks.run(lambda rank: parts[rank].prepare_publish()) == [[1], [1]]  # its start has only begun
    ranks.run(lambda rank: parts[rank].published([0, 1]))
    assert [part.states.lost for part in parts] == [{0: "killed by SIGKILL"}] * RANKS
    dead.may_start.set()
    parts[0]._start.wait()
    assert ranks.run(lambda rank: parts[rank].prepare_publish()) == [[0, 1], [0, 1]]
    # not before it holds the weights
    assert [part.states.lost for part in parts] == [{0: "killed by SIGKILL"}] * RANKS
    ranks.run(lambda rank: parts[rank].published([0, 1]))
    assert [part.states.lost for part in parts] == [{}, {}] and dead.restarts == 1 and alive.restarts == 0


def test_where_nothing_is_left_a_publish_waits_for_a_start(ranks):
    engines = [
        Restartable("dead"),
        Restartable("dead", EngineError("engine.server.max_restarts = 0 are used up")),
    ]
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


def test_a_replica_that_dies_in_a_publish_is_left_out_and_the_others_are_given_everything_again(
    ranks, publishes
):
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
    assert "weight version 4: engine replica" in stats[0].notes[-1] and "was restarted" in stats[0].notes[-1]


def test_a_publish_that_fails_with_all_engines_alive_ends_the_run(ranks, publishes):
    """Weights that an engine refuses, or computes something else with, are no matter of restarts."""
    engines = [Restartable(), Restartable()]
    publishers, below = publishes(*engines)
    below.deaths[4, 1] = "serving"
    errors = ranks.run(lambda rank: publishers[rank].publish(4))
    assert [type(error) for error in errors] == [PublishError] * RANKS and [
        engine.forgot for engine in engines
    ] == [0, 0]


def test_a_revived_replica_gets_the_newest_version_and_the_log_says_so_with_the_next_publish(
    ranks, publishes
):
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
    assert "weight version 7: engine replica 1 was restarted and generates again" in notes
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
        part._waiting = wait
    publishers = [RecoveringPublisher(Publishes(engines, ranks), part) for part in parts]
    assert [type(error) for error in ranks.run(lambda rank: publishers[rank].revive())] == [
        StopRequested
    ] * RANKS
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
    assert stats[0].notes == (
        "from below",
        "warning: weight version 4: engine replica 0 is lost: killed by SIGKILL",
    )
    stats = ranks.run(lambda rank: publishers[rank].publish(5))
    assert stats[0].notes == ("from below",)  # told once
    dead.may_start.set()
    parts[0]._start.wait()
    stats = ranks.run(lambda rank: publishers[rank].publish(6))
    assert published[4:] == [(6, [0, 1])] * RANKS and stats[0].metrics["rollout/lost_replicas"] == 0
    assert stats[1].notes[-1] == "weight version 6: engine replica 0 was restarted and generates again"
