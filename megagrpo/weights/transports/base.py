"""The contract of a transport: how the slices of a bucket come together in memory that an engine's ranks can
read.

A transport has two memories (slots) for every replica and uses them in turn: while the engine loads one
bucket the next is written. They exist during a publish only. A subclass says where the memory is and how the
slices get there.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.weights.plan.boxes import Box, slices
from megagrpo.weights.plan.bucket_layout import BucketLayout, PlacedTensor
from megagrpo.weights.plan.publish_plan import PublishPlan, Transfer
from megagrpo.weights.plan.sources import SourceTensor
from megagrpo.weights.plan.targets import TargetTensor
from megagrpo.weights.read.slice_reader import SliceReader
from megagrpo.wire.manifest import BucketManifest, TensorEntry, checksum_of

SLOTS = 2
NO_CHECKSUM = "00000000"  # of no bytes


@dataclass
class TransportStats:
    """What one publish moved on this rank."""

    planned_bytes: int = 0  # of this rank's slices
    written_bytes: int = 0  # of these, to wherever they go; less where only changes are sent
    sent_bytes: int = 0  # of these, through a process group
    peak_bytes: int = 0  # most memory beside the model's: this rank's slots and messages


@dataclass(frozen=True)
class TransportContext:
    """What every transport needs to know."""

    plan: PublishPlan
    reader: SliceReader
    rank: int
    world_size: int
    owners: tuple[int, ...]  # the trainer rank that hands buckets to each replica
    dtype: torch.dtype  # of the weights on their way, but those that have one of their own
    timeout_seconds: float
    token: str  # names this run's memories; equal on all ranks

    def dtype_of(self, tensor: SourceTensor | TargetTensor) -> torch.dtype:
        """Return the dtype in which a tensor travels."""
        return self.dtype if tensor.dtype is None else getattr(torch, tensor.dtype)


@dataclass(frozen=True)
class Run:
    """Neighbouring bytes of a slot that one rank has: blocks of a parameter that changed."""

    replica: int
    destination: int
    number: int  # of the parameter, in the bucket's layout
    start: int  # element of all that is sent of the parameter
    elements: int
    offset: int  # in the slot
    nbytes: int


class Transport(ABC):
    """Brings a bucket's slices together, for every replica at once.

    Calls of a publish, by every rank, each checked by all before the next: `open`, `attach`, `connect`, then
    per bucket `write`, `checksums`, `deliver` (checked by `wait_delivered` after the next `write`); `close`
    also after an error.
    """

    name: ClassVar[str]  # in manifests too: how the engine reads the memory
    # Buckets of memory that a rank has at its peak. Where it is more than two, buckets are planned smaller:
    # the bytes stay those of two.
    buckets_alive: ClassVar[int] = SLOTS

    def __init__(self, context: TransportContext):
        self.context, self.plan, self.rank = context, context.plan, context.rank
        self.stats = TransportStats()
        self.version = -1
        self.chosen: tuple[int, ...] = ()  # replicas of the publish that is under way
        self.base: int | None = None  # the version that they hold, if what they have is not sent
        # bucket -> positions of parameters that they have; of layout `full`
        self.left_out: dict[int, frozenset[int]] = {}
        # (replica, slot) -> bytes [slot_bytes], of those that this rank can reach
        self.memory: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def layouts(self) -> list[BucketLayout]:
        """The memory layout of every bucket."""
        return [BucketLayout(self.plan, bucket) for bucket in self.plan.buckets]

    @cached_property
    def _all_sends(self) -> list[list[Transfer]]:
        """What this rank sends of every bucket."""
        return [self.plan.sends(bucket, self.rank) for bucket in self.plan.buckets]

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: that of the largest bucket."""
        return max(layout.nbytes for layout in self.layouts)

    @property
    def own_replicas(self) -> list[int]:
        """Replicas of this publish to which this rank hands buckets."""
        return [replica for replica in self.chosen if self.context.owners[replica] == self.rank]

    def sends(self, bucket: int) -> list[Transfer]:
        """Return what this rank sends of a bucket in this publish."""
        left_out = self.left_out.get(bucket, frozenset())
        return [
            transfer
            for transfer in self._all_sends[bucket]
            if transfer.replica in self.chosen and transfer.target not in left_out
        ]

    def receives(self, bucket: int, replica: int, destination: int) -> list[Transfer]:
        """Return what an engine rank gets of a bucket in this publish."""
        left_out = self.left_out.get(bucket, frozenset())
        found = self.plan.receives(self.plan.buckets[bucket], replica, destination)
        return [transfer for transfer in found if transfer.target not in left_out]

    @property
    def base_version(self) -> int | None:
        """The version from which engines can be brought to the next one by what changed alone; None: by no
        version.
        """
        return None

    def open(self, version: int, replicas: Sequence[int], base_version: int | None = None) -> None:
        """Begin a publish: make the slots of the replicas that this rank owns.

        Args:
            base_version: `base_version` of this transport, if all of the replicas hold it; None: everything
                is sent.

        Raises:
            OSError: there is no room.
        """
        self.version, self.chosen, self.base, self.left_out = version, tuple(replicas), base_version, {}
        self.stats = TransportStats()
        for replica in self.own_replicas:
            for slot in range(SLOTS):
                self.memory[replica, slot] = self.make_slot(replica, slot)
        self.note_peak()

    @abstractmethod
    def make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Return memory [slot_bytes] of bytes, zeros."""

    @abstractmethod
    def attach(self) -> None:
        """Reach the slots that other ranks made, where the transport writes there directly."""

    def write(self, bucket: int, slot: int) -> None:
        """Bring this rank's slices of a bucket to their places; when all ranks have, the slots are
        complete. Collective over all ranks.
        """
        try:
            self.context.reader.prepare(self.plan.buckets[bucket])
            self.write_slices(bucket, slot)
        finally:
            self.context.reader.forget()  # its copies are of the weights of this version

    @abstractmethod
    def write_slices(self, bucket: int, slot: int) -> None:
        """Do what `write` says, in the transport's way."""

    @abstractmethod
    def carry(
        self, bucket: int, slot: int, runs: Sequence[Sequence[Run]], blocks: Sequence[torch.Tensor]
    ) -> None:
        """Bring changes to their places in the slot, instead of slices. Collective over all ranks.

        Args:
            runs: of every rank, by rank.
            blocks: this rank's, of any shape, one for each of its runs.
        """

    @abstractmethod
    def location(self, replica: int, slot: int) -> dict[str, Any]:
        """Return where a slot is, for the manifest. The owner's call."""

    def connect(self, engine: BucketEngine) -> None:  # noqa: B027 (most hand over memory alone)
        """Reach the ranks of the engines themselves, where slices go straight to them. Collective over all
        ranks.

        Args:
            engine: this rank's.
        """

    def deliver(self, bucket: int, slot: int) -> None:  # noqa: B027
        """Begin to send a bucket to the engines' ranks, which are told to receive it at the same time;
        does not wait.
        """

    def wait_delivered(self) -> None:  # noqa: B027
        """Wait until what `deliver` began is done. Raises what went wrong with it."""

    def committed(self, version: int) -> None:  # noqa: B027 (most remember nothing)
        """All replicas of this publish hold `version`."""

    @abstractmethod
    def close(self) -> None:
        """Give the slots back. Allowed at any time, twice too."""

    def end(self) -> None:
        """Give back what is kept between publishes too; nothing is published afterwards."""
        self.close()

    def checksums(self, bucket: int, slot: int) -> dict[tuple[int, int], str]:
        """Return {(replica, position in the layout): checksum} of complete parameters; every one is in
        some rank's answer once.
        """
        return {
            (replica, number): checksum_of(self.view(replica, slot, placed).cpu())
            for replica in self.own_replicas
            for number, placed in enumerate(self.layouts[bucket].tensors)
        }

    def describe(
        self, version: int, bucket: int, checksums: Sequence[str], location: dict[str, Any]
    ) -> BucketManifest:
        """Return the manifest of a complete bucket at a place."""
        sharded = self.plan.grid.layout == "sharded"
        entries = []
        for placed, checksum in zip(self.layouts[bucket].tensors, checksums, strict=True):
            target, rank = placed.target, placed.destination if sharded else None
            dtype = str(self.context.dtype_of(target)).removeprefix("torch.")
            entry = TensorEntry(
                target.name, dtype, target.shape, placed.offset, placed.nbytes, checksum, rank
            )
            is_left_out = placed.position in self.left_out.get(bucket, frozenset())
            entries.append(
                replace(entry, offset=0, nbytes=0, checksum=NO_CHECKSUM, patches=()) if is_left_out else entry
            )
        return BucketManifest(version, self.name, location, self.plan.grid.layout, tuple(entries), self.base)

    def manifest(
        self, version: int, bucket: int, slot: int, replica: int, checksums: Sequence[str]
    ) -> BucketManifest:
        """Return the manifest of a complete bucket of a replica; what its location names is there when
        this returns. The owner's call.
        """
        return self.hand_out(
            self.describe(version, bucket, checksums, self.location(replica, slot)), bucket, slot, replica
        )

    def hand_out(self, described: BucketManifest, bucket: int, slot: int, replica: int) -> BucketManifest:
        """Make what a manifest's location names, where it is not there yet; return the manifest as it goes
        to the engine.
        """
        return described

    # ---- what subclasses share

    def view(self, replica: int, slot: int, placed: PlacedTensor) -> torch.Tensor:
        """Return a parameter's memory, in the grid in which its parts are placed."""
        raw = self.memory[replica, slot][placed.offset : placed.offset + placed.nbytes]
        return raw.view(self.context.dtype_of(placed.target)).view(placed.target.grid)

    def put(self, bucket: int, slot: int, transfer: Transfer, place: Box, tensor: torch.Tensor) -> None:
        """Copy a slice to its place, in the dtype of the publish."""
        placed = self.layouts[bucket].find(transfer.destination, transfer.target)
        self.view(transfer.replica, slot, placed)[slices(place)].copy_(tensor)

    def put_own(self, bucket: int, slot: int, transfer: Transfer) -> None:
        """Copy this rank's slices of a transfer straight from the weights to their places."""
        for place, tensor in self.context.reader.read(transfer):
            self.put(bucket, slot, transfer, place, tensor)

    def put_runs(self, slot: int, runs: Sequence[Run], blocks: Sequence[torch.Tensor]) -> None:
        """Copy blocks to their places."""
        for run, tensor in zip(runs, blocks, strict=True):
            self.memory[run.replica, slot][run.offset : run.offset + run.nbytes].copy_(
                tensor.reshape(-1).view(torch.uint8)
            )

    def clear_padding(self, bucket: int, slot: int) -> None:
        """Zero the rows that nobody sends in the slots that this rank owns."""
        for placed in self.layouts[bucket].tensors:
            if rows := placed.padding_rows:
                for replica in self.own_replicas:
                    self.view(replica, slot, placed)[-rows:].zero_()

    def note_peak(self, message_bytes: int = 0) -> None:
        """Count the memory of this rank's own slots and of messages on their way."""
        own = sum(
            memory.nbytes for (replica, _), memory in self.memory.items() if replica in self.own_replicas
        )
        self.stats.peak_bytes = max(self.stats.peak_bytes, own + message_bytes)
