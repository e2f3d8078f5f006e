"""Publishes to the replicas that are there, and to lost ones once they are restarted."""

from collections.abc import Collection
from dataclasses import replace

from megagrpo.errors import StopRequested
from megagrpo.fleet.replica_recovery import ReplicaRecovery
from megagrpo.weights.publisher import Publisher, PublishError, PublishStats


class RecoveringPublisher(Publisher):
    """Publishes to the replicas that are there, and to lost ones once they are back."""

    def __init__(self, publisher: Publisher, recovery: ReplicaRecovery):
        self.publisher, self.recovery, self.exporter = publisher, recovery, publisher.exporter
        self._version = -1  # the newest one that was published
        self._told: dict[int, str] = {}  # lost replicas that the log names already
        self._notes: list[str] = []  # lines for the log, written with the next publish of a step

    def publish(self, version: int, replicas: Collection[int] | None = None) -> PublishStats:
        """Bring the engines to `version`; see Publisher.publish.

        If a replica dies meanwhile, the version is published again to the others, or, where none is left, to
        the first replica that could be restarted. Where none could be, no engine takes the weights, and the
        next rollout ends the run.
        """
        stats = self._publish(version, replicas)
        notes, self._notes = self._notes, []
        return replace(
            stats,
            metrics=stats.metrics | {"rollout/lost_replicas": len(self.recovery.states.lost)},
            notes=(*stats.notes, *notes),
        )

    def revive(self) -> bool:
        """Recover a replica when all are lost: restart it, publish to it. Return whether one generates now.
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
                    f"weight version {version}: engine replica {replica} was restarted and generates again"
                )
            return stats

    def _note_lost(self, version: int) -> None:
        """Log each replica that is newly lost, or lost for a new reason."""
        lost = self.recovery.states.lost
        news = sorted(lost.items() - self._told.items())
        self._notes += [
            f"warning: weight version {version}: engine replica {replica} is lost: {why}"
            for replica, why in news
        ]
        self._told = dict(lost)
