"""Which engine replicas generate: what failed, what is tried again, what is lost. The same on all ranks, from
metadata that all hold.

What a replica failed on goes to others, where there are any, after a pause that doubles. One whose engine
still says that it serves gets prompts again; one that doesn't, or that fails MAX_FAILURES times in a row, is
lost: it gets none until it is found again.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megagrpo.parallel.plain_data import exchangeable
from megagrpo.rollout.dealing import deal_groups

MAX_FAILURES = 3
FIRST_PAUSE_SECONDS = 0.5


@exchangeable
@dataclass(frozen=True)
class EngineFailure:
    """A rank's engine has failed in the midst of a request."""

    message: str
    is_ready: bool  # the engine says that it would serve now
    life: int = 0  # of the replica, when it was asked: what failed before it was found again is no news


class ReplicaStates:
    """Deals groups to the ranks of the replicas that generate."""

    def __init__(self, replica_of_rank: Sequence[int]):
        self.replica_of_rank = tuple(replica_of_rank)
        self.lost: dict[int, str] = {}  # replica -> why
        self._failures: Counter[int] = Counter()  # in a row
        self._lives: Counter[int] = Counter()  # times that a replica was found again

    def deal(self, costs: Sequence[float], is_retry: bool = False) -> list[list[int]]:
        """Return the groups of each rank; none where its replica is lost, or has failed last if this is a
        retry and others haven't.
        """
        ranks = [rank for rank, replica in enumerate(self.replica_of_rank) if replica not in self.lost]
        if is_retry:
            ranks = [rank for rank in ranks if not self._failures[self.replica_of_rank[rank]]] or ranks
        if not ranks:
            return [[] for _ in self.replica_of_rank]
        dealt = deal_groups(costs, [self.replica_of_rank[rank] for rank in ranks])
        by_rank = dict(zip(ranks, dealt, strict=True))
        return [by_rank.get(rank, []) for rank in range(len(self.replica_of_rank))]

    def take(self, failures: Sequence[EngineFailure | None], served: Collection[int]) -> float:
        """Note how a round went; return the seconds to wait before the next.

        Args:
            failures: by rank.
            served: ranks that got something from their replicas.
        """
        failed: dict[int, list[EngineFailure]] = {}
        for replica, failure in zip(self.replica_of_rank, failures, strict=True):
            if failure is not None and failure.life == self._lives[replica]:
                failed.setdefault(replica, []).append(failure)
        pause = 0.0
        for replica in set(self.replica_of_rank):
            if replica not in failed:
                if any(self.replica_of_rank[rank] == replica for rank in served):
                    self._failures[replica] = 0
                continue
            self._failures[replica] += 1
            if self._failures[replica] >= MAX_FAILURES or not all(
                failure.is_ready for failure in failed[replica]
            ):
                self.lost[replica] = failed[replica][0].message
            else:
                pause = max(pause, FIRST_PAUSE_SECONDS * 2 ** (self._failures[replica] - 1))
        return pause

    def life(self, rank: int) -> int:
        """Return the number of the life that a rank's replica lives now."""
        return self._lives[self.replica_of_rank[rank]]

    @property
    def is_any_left(self) -> bool:
        """Say whether anything generates."""
        return any(replica not in self.lost for replica in self.replica_of_rank)

    def describe_lost(self) -> str:
        """Return what is lost and why, for a message."""
        return "; ".join(f"replica {replica}: {why}" for replica, why in sorted(self.lost.items()))

    def find(self, replica: int) -> None:
        """Let a lost replica generate again: it was started anew and holds the newest weights."""
        self.lost.pop(replica, None)
        self._failures[replica] = 0
        self._lives[replica] += 1
