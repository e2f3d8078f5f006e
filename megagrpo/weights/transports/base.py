"""The contract of a transport: it brings the selected part of a bucket to memory that an engine's ranks can
read.

A transport has room for two buckets (slots) and uses them in turn: while the engine loads one bucket the next
is written. What is sent is a selection's (`weights/selection`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.weights.context import PublishContext
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.weights.selection.base import SelectedBucket
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry

SLOTS = 2


@dataclass
class TransportStats:
    """What one publish moved on this rank."""

    planned_bytes: int = 0  # all of this rank's slices
    written_bytes: int = 0  # what was written of them, wherever it goes; less where only changes are sent
    sent_bytes: int = 0  # what went through a process group
    peak_bytes: int = 0  # most memory beside the model's: this rank's slots and messages


class Transport(ABC):
    """Brings a bucket together, for every replica at once.

    Every rank makes these calls in a publish, and all ranks agree on each before the next: `open`, `attach`,
        `connect`, then
    per bucket `write`, `checksums`, `deliver` (checked by `wait_delivered` after the next `write`) and
    `manifest`; `committed`; `close` also after an error.
    """

    name: ClassVar[str]  # in manifests too: how the engine reads the memory
    # Buckets of memory that a rank has at its peak. Where it is more than two, buckets are planned smaller:
    # the bytes stay those of two.
    buckets_alive: ClassVar[int] = SLOTS

    def __init__(self, context: PublishContext):
        self.context, self.plan, self.rank = context, context.plan, context.rank
        self.stats = TransportStats()
        self.version = -1
        self.chosen: tuple[int, ...] = ()  # replicas of the publish that is under way
        self._written: dict[int, SelectedBucket] = {}  # by slot

    def open(self, version: int, replicas: Sequence[int]) -> None:
        """Begin a publish: make the memory of the replicas that this rank owns.

        Raises:
            OSError: there is no room.
        """
        self.version, self.chosen, self.stats = version, tuple(replicas), TransportStats()

    def attach(self) -> None:  # noqa: B027 (most reach no other rank's memory)
        """Reach the slots that other ranks made, where the transport writes there directly."""

    def connect(self, engine: BucketEngine) -> None:  # noqa: B027 (most hand over memory alone)
        """Reach the ranks of the engines themselves, where slices go straight to them. Collective over all
        ranks.

        Args:
            engine: this rank's.
        """

    def write(self, bucket: SelectedBucket, slot: int) -> None:
        """Bring what is sent of a bucket to its place; when all ranks have, the slot is complete. Collective
        over all ranks.
        """
        self._written[slot] = self._write(bucket, slot)
        self.stats.planned_bytes += bucket.planned_bytes
        self.stats.written_bytes += bucket.nbytes

    def checksums(self, slot: int) -> dict[tuple[int, int], str]:
        """Return {(replica, number in the layout): checksum} of what is sent of each parameter of a complete
        slot; each parameter is in the answer of exactly one rank.
        """
        bucket = self._written[slot]
        if bucket.blocks is None:
            return self._checksums(bucket, slot)
        places = (
            (replica, number)
            for replica in self._own_replicas
            for number in range(len(self.context.layouts[bucket.number].tensors))
        )
        return {place: bucket.blocks.region(place).checksum for place in places}

    def deliver(self, slot: int) -> None:  # noqa: B027 (most hand over memory alone)
        """Begin to send a slot to the engines' ranks, which are told to receive it at the same time; does
        not wait.
        """

    def wait_delivered(self) -> None:  # noqa: B027
        """Wait until what `deliver` began is done. Raises what went wrong with it."""

    def manifest(self, slot: int, replica: int, checksums: Sequence[str]) -> BucketManifest:
        """Return the manifest of a complete slot of a replica; what its location names is there when this
        returns. One that another rank owns gets no location.

        Args:
            checksums: of the parameters, in the order of the layout.
        """
        bucket = self._written[slot]
        sharded = self.plan.grid.layout == "sharded"
        entries = []
        for number, placed in enumerate(self.context.layouts[bucket.number].tensors):
            target, rank = placed.target, placed.destination if sharded else None
            dtype = str(self.context.dtype_of(target)).removeprefix("torch.")
            entry = TensorEntry(
                target.name, dtype, target.shape, placed.offset, placed.nbytes, checksums[number], rank
            )
            entries.append(bucket.describe(entry, placed.position, (replica, number)))
        is_owner = replica in self._own_replicas
        location = self._location(slot, replica) if is_owner else {}
        described = BucketManifest(
            self.version, self.name, location, self.plan.grid.layout, tuple(entries), bucket.base
        )
        return self._hand_out(described, slot, replica) if is_owner else described

    def committed(self, version: int) -> None:  # noqa: B027 (most remember nothing)
        """Note that all replicas of this publish hold `version`."""

    @abstractmethod
    def close(self) -> None:
        """Give the slots back. Allowed at any time, twice too."""

    def end(self) -> None:
        """Give back what is kept between publishes too; nothing is published afterwards."""
        self.close()

    # ---- what subclasses do, and share

    @abstractmethod
    def _write(self, bucket: SelectedBucket, slot: int) -> SelectedBucket:
        """Do what `write` says; return of the bucket what is needed until the slot is written again."""

    @abstractmethod
    def _checksums(self, bucket: SelectedBucket, slot: int) -> dict[tuple[int, int], str]:
        """Do what `checksums` says, of a slot of slices."""

    @abstractmethod
    def _location(self, slot: int, replica: int) -> dict[str, Any]:
        """Return where a slot is, for the manifest. The owner calls it."""

    def _hand_out(self, described: BucketManifest, slot: int, replica: int) -> BucketManifest:
        """Make the file or memory that a manifest's location names, unless it is there; return the manifest
        that the engine gets. The owner calls it.
        """
        return described

    @property
    def _own_replicas(self) -> list[int]:
        """Replicas of this publish to which this rank hands buckets."""
        return [replica for replica in self.chosen if self.context.owners[replica] == self.rank]

    def _receives(self, bucket: SelectedBucket, replica: int, destination: int) -> list[Transfer]:
        """Return the slices that an engine rank gets of a bucket."""
        return bucket.keep(self.plan.receives(self.plan.buckets[bucket.number], replica, destination))
