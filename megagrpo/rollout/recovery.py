"""Starts lost engines anew while the others go on, and says before each publish who can take the new weights."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.rollout.background import BackgroundWork
from megagrpo.rollout.engines.remote import RemoteEngine
from megagrpo.rollout.replica_states import ReplicaStates
from megagrpo.weights.publisher import Publisher, PublishStats

_UPDATABLE = ("serving", "empty", "stale")  # states of an engine that takes a whole update


class RecoveringPublisher(Publisher):
    """Publishes to the replicas that are there, and to lost ones once they are back."""

    def __init__(self, publisher: Publisher, recovery: "ReplicaRecovery"):
        self.publisher, self.recovery, self.exporter = publisher, recovery, publisher.exporter
        self._told: dict[int, str] = {}  # lost replicas, as the log has them

    def publish(self, version: int, replicas: Collection[int] | None = None) -> PublishStats:
        """Bring the engines to `version`; see Publisher.publish."""
        usable = self.recovery.prepare_publish()
        chosen = [replica for replica in usable if replicas is None or replica in replicas]
        stats = self.publisher.publish(version, chosen) if chosen else PublishStats(version, 0, 0)
        found = self.recovery.published() if chosen else []
        lost = self.recovery.states.lost
        news = sorted(lost.items() - self._told.items())
        self._told = dict(lost)
        notes = [f"warning: weight version {version}: engine replica {replica} is lost: {why}" for replica, why in news]
        notes += [f"weight version {version}: engine replica {replica} was started anew and generates again" for replica in found]
        return replace(stats, metrics=stats.metrics | {"rollout/lost_replicas": len(lost)}, notes=(*stats.notes, *notes))

    def close(self) -> None:
        """Give back what is held between publishes."""
        self.publisher.close()


class ReplicaRecovery:
    """This rank's part in the recovery of the replicas of engines in processes of their own.

    A start takes from seconds to minutes, so it runs in a thread of the owner; the replica takes part in the first publish after it.
    """

    def __init__(self, engine: RemoteEngine, states: ReplicaStates, owners: Sequence[int], rank: int):
        """
        Args:
            engine: this rank's view of its replica.
            owners: the rank that starts each replica.
        """
        self.engine, self.states, self.owners, self.rank = engine, states, owners, rank
        self.replica = states.replica_of_rank[rank]
        self._start: BackgroundWork[None] | None = None
        self._started: list[int] = []

    def prepare_publish(self) -> list[int]:
        """Return the replicas that can take weights; begin to start those anew that are lost. Collective over all ranks.

        Waits for a start only where nothing else is left. An empty list: none is left and none starts, which ends the run at its next
        rollout, where the trainer's state is whole.
        """
        self._find_lost()
        while True:
            told = all_gather_metadata(self._report())
            self._started = [replica for replica, owner in enumerate(self.owners) if told[owner] == "started"]
            for replica, owner in enumerate(self.owners):
                if replica in self.states.lost and told[owner] not in (None, "started", "starting"):
                    self.states.lost[replica] = told[owner]
            usable = [replica for replica in range(len(self.owners)) if replica not in self.states.lost or replica in self._started]
            if usable:
                if self.replica in self._started and not self._is_owner:
                    self.engine.restart()  # a follower takes note of it
                return usable
            if "starting" not in told:
                return []
            if self._start is not None:
                self._start.wait()

    def published(self) -> list[int]:
        """Let the replicas that were started anew, and have just taken the weights, generate again; return them."""
        found, self._started = self._started, []
        for replica in found:
            self.states.find(replica)
            if replica == self.replica:
                self._start = None
        return found

    def _find_lost(self) -> None:
        """Notice servers that died while nobody asked them anything. Collective over all ranks."""
        health = self.engine.health()
        told = all_gather_metadata(None if health.state in _UPDATABLE else health.detail or f"it is {health.state}")
        for replica, owner in enumerate(self.owners):
            if told[owner] is not None:
                self.states.lost.setdefault(replica, told[owner])

    @property
    def _is_owner(self) -> bool:
        return self.owners[self.replica] == self.rank

    def _report(self) -> str | None:
        """Return what became of this rank's lost replica: "starting", "started", or why it can't be; None where there is nothing to say."""
        if not self._is_owner or self.replica not in self.states.lost:
            return None
        if self._start is None:
            self._start = BackgroundWork(self.engine.restart, "start engine")
        if not self._start.wait(seconds=0.0):
            return "starting"
        outcome = self._start.outcome()
        return "started" if outcome is None else f"{self.states.lost[self.replica]}; {outcome}"
