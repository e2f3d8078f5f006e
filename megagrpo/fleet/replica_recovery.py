"""Restarts lost replicas of engines while the others go on."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from megagrpo.engines.base import EngineState
from megagrpo.engines.server.engine import ServerEngine
from megagrpo.errors import UserError
from megagrpo.parallel.background import BackgroundWork
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.parallel.plain_data import exchangeable
from megagrpo.rollout.dealing import ReplicaStates

# states of an engine that takes a whole update
_UPDATABLE = (EngineState.SERVING, EngineState.EMPTY, EngineState.STALE)
_POLL_SECONDS = 1.0  # between two checks of a restart that all ranks wait for


@exchangeable
@dataclass(frozen=True)
class _Start:
    """What an owner tells of the start of its lost replica: nothing yet while it is under way."""

    address: str | None = None  # where the restarted server is reached
    failure: str | None = None  # why it can't be restarted

    @property
    def is_under_way(self) -> bool:
        """Whether the server may still come up."""
        return self.address is None and self.failure is None


class ReplicaRecovery:
    """This rank's part in the recovery of the replicas of engines in processes of their own.

    A restart takes seconds to minutes, so it runs in a thread of the owner; the replica takes part in the
    first publish after it.

    Attributes:
        is_given_up: whether the run was to stop when they waited last; the same on all ranks.
    """

    def __init__(
        self,
        engine: ServerEngine,
        states: ReplicaStates,
        owners: Sequence[int],
        rank: int,
        is_stopping: Callable[[], bool] = lambda: False,
        waiting: Callable[[], AbstractContextManager] = nullcontext,
    ):
        """Begin with every replica as `states` has it.

        Args:
            engine: this rank's view of its replica.
            owners: the rank that starts each replica.
            is_stopping: says whether this rank knows that the run is to stop; then nobody waits for a
                restart.
            waiting: what all ranks are in while they wait for a restart, because nothing else is left.
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
        """Return the replicas that can take weights; begin to restart the lost ones. Collective over
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
        """Return the replicas that can take weights, and, where there are none yet, whether to wait for a
        restart. Collective.
        """
        gathered = all_gather_metadata((self._report(), self._is_stopping()))
        self.is_given_up = any(is_stopping for _, is_stopping in gathered)
        of_replica = {
            replica: report
            for replica, owner in enumerate(self.owners)
            if (report := gathered[owner][0]) is not None
        }
        self._started = [replica for replica, report in of_replica.items() if report.address is not None]
        self.states.lost |= {
            replica: report.failure for replica, report in of_replica.items() if report.failure is not None
        }
        usable = [
            replica
            for replica in range(len(self.owners))
            if replica not in self.states.lost or replica in self._started
        ]
        if self.replica in self._started and not self._is_owner:
            self.engine.restart(of_replica[self.replica].address)  # a follower takes note of it
        return usable, not usable and not self.is_given_up and any(
            report.is_under_way for report in of_replica.values()
        )

    def published(self, chosen: Collection[int]) -> list[int]:
        """Let the replicas of `chosen` that were restarted generate again: they have the weights now. Return
        them.
        """
        found = [replica for replica in self._started if replica in chosen]
        for replica in found:
            self.states.recover(replica)
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
        """Find servers that died while nobody called them; return all that are dead. Collective over all
        ranks.
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
        """Return the state of the restart of this rank's replica; None where it is not lost. A start that
        failed is tried again.
        """
        if not self._is_owner or self.replica not in self.states.lost:
            return None
        if self._start is not None:
            if not self._start.wait(seconds=0.0):
                return _Start()
            outcome = self._start.outcome()
            if outcome is None and self.engine.health().state in _UPDATABLE:
                return _Start(address=self.engine.address)
            if outcome is not None and not isinstance(outcome, UserError):
                known = self.states.lost[self.replica].removesuffix(f"; {outcome}")
                return _Start(failure=f"{known}; {outcome}")
        # Restart it: for the first time, or again where it died or did not come up, while restarts are left.
        self._start = BackgroundWork(self.engine.restart, "start engine")
        return _Start()
