"""What of the weights a publish sends: the contract, and everything. How it gets there is a transport's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megagrpo.weights.context import PublishContext
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.weights.selection.selected import SelectedBucket


class Selection(ABC):
    """Chooses what is sent, bucket by bucket.

    Calls of a publish, by every rank: `open`, `select` for each bucket in turn, then `commit`, or `abort` if
    anything failed.
    """

    def __init__(self, context: PublishContext):
        self.context = context
        self._chosen: frozenset[int] = frozenset()  # replicas of the publish that is under way

    @property
    def base_version(self) -> int | None:
        """The version from which engines can be brought to the next one by what changed alone; None: by no
        version.
        """
        return None

    def open(self, replicas: Sequence[int], base_version: int | None = None) -> None:
        """Begin a publish.

        Args:
            base_version: `base_version` of this selection, if all of the replicas hold it; None: everything
                is sent.
        """
        self._chosen = frozenset(replicas)

    @abstractmethod
    def select(self, bucket: int) -> SelectedBucket:
        """Return what is sent of a bucket. Collective over all ranks."""

    def commit(self, version: int) -> None:  # noqa: B027 (most remember nothing)
        """All replicas of this publish hold `version`."""

    def abort(self) -> None:  # noqa: B027
        """The publish failed: nobody knows what the engines hold."""

    def _sends(self, bucket: int) -> list[Transfer]:
        """Return the slices that this rank has of a bucket, for the replicas of this publish."""
        return [transfer for transfer in self.context.sends[bucket] if transfer.replica in self._chosen]

    def _bytes(self, transfers: Sequence[Transfer]) -> int:
        return sum(map(self.context.plan.transfer_bytes, transfers))


class Everything(Selection):
    """All of the weights, in every publish."""

    def select(self, bucket: int) -> SelectedBucket:
        """Return the bucket with all of its slices. Not collective."""
        sends = self._sends(bucket)
        nbytes = self._bytes(sends)
        return SelectedBucket(bucket, sends, nbytes, nbytes)
