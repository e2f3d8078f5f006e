"""Buckets in shared memory that hold only what changed since the version that the engines have."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megagrpo.rollout.engines.host.manifest import BucketManifest, Patch, checksum_of
from megagrpo.weights.delta import Change, DeltaTracker
from megagrpo.weights.publisher import agree
from megagrpo.weights.transports.base import TransportContext
from megagrpo.weights.transports.shared_memory import SharedMemoryTransport

Place = tuple[int, int, int]  # replica, destination, position of the target


class DeltaTransport(SharedMemoryTransport):
    """Shared memory, compact: the blocks of a parameter lie one after another, those of the next one behind them.

    Where the engines do not all hold the version that the tracker remembers, everything is sent, and remembered.
    """

    def __init__(self, context: TransportContext):
        super().__init__(context)
        self.tracker = DeltaTracker(context)
        self._is_delta, self._is_committed = False, True
        self._regions: dict[int, dict[Place, tuple[int, int, list[Patch]]]] = {}  # slot -> where the blocks of each parameter are

    @property
    def base_version(self) -> int | None:
        """The version that engines must hold for changes to be enough."""
        return self.tracker.version

    def open(self, version: int, replicas: Sequence[int], base_version: int | None = None) -> None:
        """Begin a publish of what changed since `base_version`; of everything if it is None."""
        self._is_delta, self._is_committed = base_version is not None, False
        super().open(version, replicas, base_version)

    def write_slices(self, bucket: int, slot: int) -> None:
        """Write the blocks that changed. Collective: every rank must know how many the others have."""
        if not self._is_delta:
            super().write_slices(bucket, slot)
            for transfer in self.sends(bucket):
                self.tracker.note(transfer)
            return
        layout = self.layouts[bucket]
        changes: list[Change] = []

        def find() -> list[tuple[Place, Patch, int]]:
            for transfer in self.sends(bucket):
                changes.extend(self.tracker.changes(transfer, layout.find(transfer.destination, transfer.target).target.grid))
                self.stats.planned_bytes += self.plan.transfer_bytes(transfer)
            return [((one.replica, one.destination, one.target), one.patch, one.blocks.nbytes) for one in changes]

        found = agree(find, f"bucket {bucket}: changes")
        offsets = self._lay_out(slot, found)
        for change, offset in zip(changes, offsets[self.rank], strict=True):
            raw = self.memory[change.replica, slot][offset : offset + change.blocks.nbytes]
            raw.copy_(change.blocks.reshape(-1).view(torch.uint8))
            self.stats.written_bytes += change.blocks.nbytes

    def _lay_out(self, slot: int, found: list[list[tuple[Place, Patch, int]]]) -> list[list[int]]:
        """Give every change its place in its replica's slot, by parameter and then by rank; return the offsets of each rank's."""
        by_place: dict[Place, list[tuple[int, int, Patch, int]]] = defaultdict(list)
        for rank, changes in enumerate(found):
            for number, (place, patch, nbytes) in enumerate(changes):
                by_place[place].append((rank, number, patch, nbytes))
        offsets = [[0] * len(changes) for changes in found]
        ends: dict[int, int] = defaultdict(int)  # of each replica's slot
        self._regions[slot] = {}
        for place in sorted(by_place):
            start = position = ends[place[0]]
            for rank, number, _, nbytes in by_place[place]:
                offsets[rank][number] = position
                position += nbytes
            ends[place[0]] = position
            self._regions[slot][place] = (start, position - start, [patch for _, _, patch, _ in by_place[place]])
        return offsets

    def checksums(self, bucket: int, slot: int) -> dict[tuple[int, int], str]:
        """Return the checksums of what was written for each parameter."""
        if not self._is_delta:
            return super().checksums(bucket, slot)
        found = {}
        for replica in self.chosen:
            for number, placed in enumerate(self.layouts[bucket].tensors):
                if (replica + number) % self.context.world_size == self.rank:
                    start, nbytes, _ = self._region(slot, replica, placed.destination, placed.position)
                    found[replica, number] = checksum_of(self.memory[replica, slot][start : start + nbytes])
        return found

    def manifest(self, version: int, bucket: int, slot: int, replica: int, checksums: Sequence[str]) -> BucketManifest:
        """Describe the blocks, where blocks were written."""
        described = super().manifest(version, bucket, slot, replica, checksums)
        if not self._is_delta:
            return described
        entries = []
        for entry, placed in zip(described.tensors, self.layouts[bucket].tensors, strict=True):
            start, nbytes, patches = self._region(slot, replica, placed.destination, placed.position)
            entries.append(replace(entry, offset=start, nbytes=nbytes, patches=tuple(patches)))
        return replace(described, tensors=tuple(entries))

    def _region(self, slot: int, *place: Any) -> tuple[int, int, list[Patch]]:
        return self._regions[slot].get(place, (0, 0, []))

    def committed(self, version: int) -> None:
        """Remember what was published."""
        self.tracker.commit(version)
        self._is_committed = True

    def close(self) -> None:
        """Remove the files; after a publish that failed engines get everything."""
        if not self._is_committed:
            self.tracker.abort()
            self._is_committed = True
        super().close()
