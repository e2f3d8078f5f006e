"""Starts lost engines anew while the others go on, and has every publish go to those that are there."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from megagrpo.engines.server.engine import RemoteEngine
from megagrpo.errors import StopRequested, UserError
from megagrpo.parallel.background import BackgroundWork
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.rollout.replica_states import ReplicaStates
from megagrpo.weights.publisher import Publisher, PublishError, PublishStats

_UPDATABLE = ("serving", "empty", "stale")  # states of an engine that takes a whole update
_POLL_SECONDS = 1.0  # between two looks of all ranks at a start that they wait for


class RecoveringPublisher(Publisher):
    """Publishes to the replicas that are there, and to lost ones once they are back."""

    def __init__(self, publisher: Publisher, recovery: "ReplicaRecovery"):
        self.publisher, self.recovery, self.exporter = publisher, recovery, publisher.exporter
        self._version = -1  # of the newest publish
        self._told: dict[int, str] = {}  # lost replicas, as the log has them
        self._notes: list[str] = []  # for the log, with the next publish of a step

    def publish(self, version: int, replicas: Collection[int] | None = None) -> PublishStats:
        """Bring the engines to `version`; see Publisher.publish.

        A replica that dies meanwhile is left out of what is then published again to the others; where there
        are none, to the first replica that could be started anew. Where that is none either, nobody takes the
        weights, and the next rollout ends the run.
        """
        stats = self._publish(version, replicas)
        notes, self._notes = self._notes, []
        return replace(
            stats,
            metrics=stats.metrics | {"rollout/lost_replicas": len(self.recovery.states.lost)},
            notes=(*stats.notes, *notes),
        )

    def revive(self) -> bool:
        """Bring a replica back that is lost, when all are: start, publish; say whether one generates now.
        Collective over all ranks.

        Raises:
            StopRequested: the run is to stop meanwhile; raised on all ranks.
        """
        self._notes += self._publish(self._version, None).notes
        if not self.recovery.states.is_any_left and self.recovery.is_given_up:
            raise StopRequested
        return self.recovery.states.is_any_left

    def close(self) -> None:
        """Give back what is held between publishes."""
        self.publisher.close()

    def _publish(self, version: int, replicas: Collection[int] | None) -> PublishStats:
        self._version = version
        while True:
            usable = self.recovery.prepare_publish()
            self._note_lost(version)
            chosen = [replica for replica in usable if replicas is None or replica in replicas]
            if not chosen:
                return PublishStats(version, 0, 0)
            try:
                stats = self.publisher.publish(version, chosen)
            except PublishError:
                if not self.recovery.drop_dead(chosen):
                    raise
                self._note_lost(version)
                continue
            for replica in self.recovery.published(chosen):
                self._told.pop(replica, None)
                self._notes.append(
                    f"weight version {version}: engine replica {replica} was started anew and generates again"
                )
            return stats

    def _note_lost(self, version: int) -> None:
        """Put what is newly lost, or lost for a new reason, into the log."""
        lost = self.recovery.states.lost
        news = sorted(lost.items() - self._told.items())
        self._notes += [
            f"warning: weight version {version}: engine replica {replica} is lost: {why}"
            for replica, why in news
        ]
        self._told = dict(lost)


@dataclass(frozen=True)
class _Start:
    """What an owner tells of the start of its lost replica."""

    state: str  # "starting", "started", "failed"
    address: str = ""  # of a server that was started
    why: str = ""  # it can't be


class ReplicaRecovery:
    """This rank's part in the recovery of the replicas of engines in processes of their own.

    A start takes from seconds to minutes, so it runs in a thread of the owner; the replica takes part in the
    first publish after it.

    Attributes:
        is_given_up: whether the run was to stop when they waited last; the same on all ranks.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        states: ReplicaStates,
        owners: Sequence[int],
        rank: int,
        is_stopping: Callable[[], bool] = lambda: False,
        waiting: Callable[[], AbstractContextManager] = nullcontext,
    ):
        """
        Args:
            engine: this rank's view of its replica.
            owners: the rank that starts each replica.
            is_stopping: says whether this rank was told that the run is to stop; then nobody waits for a
                start.
            waiting: what all ranks are in while they wait for a start, because nothing else is left.
        """
        self.engine, self.states, self.owners, self.rank, self._is_stopping = (
            engine,
            states,
            owners,
            rank,
            is_stopping,
        )
        self._waiting = waiting
        self.is_given_up = False
        self.replica = states.replica_of_rank[rank]
        self._start: BackgroundWork[None] | None = None
        self._started: list[int] = []

    def prepare_publish(self) -> list[int]:
        """Return the replicas that can take weights; begin to start those anew that are lost. Collective over
        all ranks.

        Waits for a start only where nothing else is left. An empty list: none is left and none can be
        started, or the run is to stop.
        """
        self._find_lost()
        usable, may_wait = self._look_at_starts()
        if may_wait:
            with self._waiting():
                while may_wait:
                    if self._start is not None:
                        self._start.wait(_POLL_SECONDS)
                    usable, may_wait = self._look_at_starts()
        return usable

    def _look_at_starts(self) -> tuple[list[int], bool]:
        """Return the replicas that can take weights, and whether there are none yet and a start is worth
        waiting for. Collective.
        """
        gathered = all_gather_metadata((self._report(), self._is_stopping()))
        self.is_given_up = any(is_stopping for _, is_stopping in gathered)
        of_replica = {
            replica: report
            for replica, owner in enumerate(self.owners)
            if (report := gathered[owner][0]) is not None
        }
        self._started = [replica for replica, report in of_replica.items() if report.state == "started"]
        self.states.lost |= {
            replica: report.why for replica, report in of_replica.items() if report.state == "failed"
        }
        usable = [
            replica
            for replica in range(len(self.owners))
            if replica not in self.states.lost or replica in self._started
        ]
        if self.replica in self._started and not self._is_owner:
            self.engine.restart(of_replica[self.replica].address)  # a follower takes note of it
        return usable, not usable and not self.is_given_up and any(
            report.state == "starting" for report in of_replica.values()
        )

    def published(self, chosen: Collection[int]) -> list[int]:
        """Let those of `chosen` that were started anew, and have just taken the weights, generate again;
        return them.
        """
        found = [replica for replica in self._started if replica in chosen]
        for replica in found:
            self.states.find(replica)
            if replica == self.replica:
                self._start = None
        return found

    def drop_dead(self, chosen: Collection[int]) -> bool:
        """After a publish to `chosen` that failed: note which of them are dead; say whether any is.
        Collective over all ranks.

        The others may hold the old version, half of the new one or all of it: they forget it, to be given all
        of it again.
        """
        dead = self._find_lost() & set(chosen)
        if dead and self.replica in set(chosen) - dead:
            self.engine.forget_weights()
        return bool(dead)

    def _find_lost(self) -> set[int]:
        """Notice servers that died while nobody asked them anything; return all that are dead. Collective
        over all ranks.
        """
        health = self.engine.health()
        told = all_gather_metadata(
            None if health.state in _UPDATABLE else health.detail or f"it is {health.state}"
        )
        dead = {replica for replica, owner in enumerate(self.owners) if told[owner] is not None}
        for replica in dead:
            self.states.lost.setdefault(replica, told[self.owners[replica]])
        return dead

    @property
    def _is_owner(self) -> bool:
        return self.owners[self.replica] == self.rank

    def _report(self) -> _Start | None:
        """Return what becomes of this rank's lost replica; None where there is nothing to say. What fails
        to start is tried again.
        """
        if not self._is_owner or self.replica not in self.states.lost:
            return None
        if self._start is not None:
            if not self._start.wait(seconds=0.0):
                return _Start("starting")
            outcome = self._start.outcome()
            if outcome is None and self.engine.health().state in _UPDATABLE:
                return _Start("started", address=self.engine.address)
            if outcome is not None and not isinstance(outcome, UserError):
                return _Start(
                    "failed", why=f"{self.states.lost[self.replica].removesuffix(f'; {outcome}')}; {outcome}"
                )
        # For the first time, or again: it has died anew, or did not come up. As often as restarts are left.
        self._start = BackgroundWork(self.engine.restart, "start engine")
        return _Start("starting")
