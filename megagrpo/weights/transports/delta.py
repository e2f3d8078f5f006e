"""Sends what changed since the version that the engines have, by any transport.

sharded   blocks: the engine's rank lays them over its parameters. They lie compactly in a slot, those of a
    parameter one after another.
full      whole tensors, those of which a bit changed: the engine's own loader takes nothing less, and a copy
of every HF tensor on the
          engine's side, to lay blocks over, would take as much memory as the model.

Where the engines do not all hold the version that the tracker remembers, everything is sent, and remembered.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.weights.changes import Change, DeltaTracker
from megagrpo.weights.partial_checksums import combine_shares, compute_share
from megagrpo.weights.publisher import agree
from megagrpo.weights.transports.base import NO_CHECKSUM, Run, Transport
from megagrpo.wire.manifest import BucketManifest, Patch

Place = tuple[int, int]  # replica, number of a parameter in the bucket's layout


@dataclass
class _Region:
    """What is sent of one parameter."""

    offset: int
    nbytes: int = 0
    elements: int = 0
    patches: tuple[Patch, ...] = ()
    checksum: str = NO_CHECKSUM


class DeltaTransport(Transport):
    """A transport that carries changes alone, where it can."""

    def __init__(self, carrier: Transport):
        super().__init__(carrier.context)
        self.carrier, self.name = carrier, carrier.name  # type: ignore[misc]
        self.tracker = DeltaTracker(carrier.context)
        self._is_committed = True
        self._regions: dict[int, dict[Place, _Region]] = {}  # by slot

    @property
    def base_version(self) -> int | None:
        """The version that engines must hold for changes to be enough."""
        return self.tracker.version

    def open(self, version: int, replicas: Sequence[int], base_version: int | None = None) -> None:
        """Begin a publish of what changed since `base_version`; of everything if it is None."""
        self._is_committed = False
        self.version, self.chosen, self.base = version, tuple(replicas), base_version
        self.carrier.open(version, replicas, base_version)
        self.stats = self.carrier.stats

    def write(self, bucket: int, slot: int) -> None:
        """Write what changed of this rank's slices, or all of them. Collective over all ranks."""
        if self._sends_blocks:
            self._write_blocks(bucket, slot)
            return
        if self.base is not None:
            self._leave_out(bucket)
        self.carrier.write(bucket, slot)
        if self.base is None:
            self._noting(bucket)

    def write_slices(self, bucket: int, slot: int) -> None:
        """Let the carrier do it."""
        self.carrier.write_slices(bucket, slot)

    def checksums(self, bucket: int, slot: int) -> dict[tuple[int, int], str]:
        """Return the checksums of what is sent for each parameter."""
        if not self._sends_blocks:
            return self.carrier.checksums(bucket, slot)
        numbers = range(len(self.layouts[bucket].tensors))
        return {
            place: self._region(slot, place).checksum
            for replica in self.own_replicas
            for place in ((replica, n) for n in numbers)
        }

    def describe(
        self, version: int, bucket: int, checksums: Sequence[str], location: dict[str, Any]
    ) -> BucketManifest:
        """Describe a bucket as the carrier does."""
        return self.carrier.describe(version, bucket, checksums, location)

    def manifest(
        self, version: int, bucket: int, slot: int, replica: int, checksums: Sequence[str]
    ) -> BucketManifest:
        """Describe what is sent."""
        described = self.describe(version, bucket, checksums, self.carrier.location(replica, slot))
        if self._sends_blocks:
            entries = []
            for number, entry in enumerate(described.tensors):
                region = self._region(slot, (replica, number))
                entries.append(
                    replace(entry, offset=region.offset, nbytes=region.nbytes, patches=region.patches)
                )
            described = replace(described, tensors=tuple(entries))
        return self.carrier.hand_out(described, bucket, slot, replica)

    # ---- the carrier's

    def make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Return memory of the carrier's kind."""
        return self.carrier.make_slot(replica, slot)

    def attach(self) -> None:
        """Reach the carrier's slots."""
        self.carrier.attach()

    def connect(self, engine: BucketEngine) -> None:
        """Reach the ranks of the engines, where the carrier does."""
        self.carrier.connect(engine)

    def carry(
        self, bucket: int, slot: int, runs: Sequence[Sequence[Run]], blocks: Sequence[torch.Tensor]
    ) -> None:
        """Let the carrier do it."""
        self.carrier.carry(bucket, slot, runs, blocks)

    def location(self, replica: int, slot: int) -> dict[str, Any]:
        """Return where the carrier's slot is."""
        return self.carrier.location(replica, slot)

    def deliver(self, bucket: int, slot: int) -> None:
        """Let the carrier begin to send."""
        self.carrier.deliver(bucket, slot)

    def wait_delivered(self) -> None:
        """Wait for the carrier."""
        self.carrier.wait_delivered()

    def committed(self, version: int) -> None:
        """Remember what was published."""
        self.tracker.commit(version)
        self._is_committed = True
        self.carrier.committed(version)

    def close(self) -> None:
        """Give the carrier's slots back; after a publish that failed engines get everything."""
        if not self._is_committed:
            self.tracker.abort()
            self._is_committed = True
        self.carrier.close()

    def end(self) -> None:
        """Let the carrier give back what it keeps."""
        self.close()
        self.carrier.end()

    # ---- changes

    @property
    def _sends_blocks(self) -> bool:
        return self.base is not None and self.plan.grid.layout == "sharded"

    def _noting(self, bucket: int) -> None:
        """Remember a bucket's slices."""
        try:
            for transfer in self.carrier.sends(bucket):
                self.tracker.note(transfer)
        finally:
            self.context.reader.forget()

    def _leave_out(self, bucket: int) -> None:
        """Have the carrier leave out the tensors that no rank has changes of. Collective over all ranks."""
        sends = self.carrier.sends(bucket)
        try:
            found = agree(
                lambda: {transfer.target for transfer in sends if self.tracker.is_changed(transfer)},
                f"bucket {bucket}: changes",
            )
        finally:
            self.context.reader.forget()
        changed = set[int]().union(*found)
        positions = range(self.plan.buckets[bucket].first, self.plan.buckets[bucket].last)
        self.carrier.left_out[bucket] = frozenset(positions).difference(changed)
        self.stats.planned_bytes += sum(
            self.plan.transfer_bytes(transfer) for transfer in sends if transfer.target not in changed
        )

    def _write_blocks(self, bucket: int, slot: int) -> None:
        """Bring the blocks that changed to their places, one parameter behind the other. Collective over
        all ranks.
        """
        layout, changes = self.layouts[bucket], list[Change]()
        numbers = {
            (placed.destination, placed.position): number for number, placed in enumerate(layout.tensors)
        }

        def find() -> list[tuple[int, int, int, Patch, int]]:
            for transfer in self.carrier.sends(bucket):
                grid = layout.find(transfer.destination, transfer.target).target.grid
                changes.extend(self.tracker.changes(transfer, grid))
                self.stats.planned_bytes += self.plan.transfer_bytes(transfer)
            return [
                (
                    one.replica,
                    one.destination,
                    numbers[one.destination, one.target],
                    one.patch,
                    one.blocks.numel(),
                )
                for one in changes
            ]

        try:
            found = agree(find, f"bucket {bucket}: changes")
        finally:
            self.context.reader.forget()
        runs, self._regions[slot] = self._lay_out(found)
        blocks = [change.blocks for change in changes]
        self.carrier.carry(bucket, slot, runs, blocks)
        self.stats.written_bytes += sum(part.nbytes for part in blocks)
        self._share_checksums(bucket, slot, runs[self.rank], blocks)

    def _lay_out(
        self, found: list[list[tuple[int, int, int, Patch, int]]]
    ) -> tuple[list[list[Run]], dict[Place, _Region]]:
        """Give every change its place in its replica's slot, by parameter and then by rank."""
        itemsize = self.context.dtype.itemsize
        runs: list[list[Run | None]] = [[None] * len(changes) for changes in found]
        by_place: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        for rank, changes in enumerate(found):
            for index, (replica, _, number, _, _) in enumerate(changes):
                by_place[replica, number].append((rank, index))
        regions: dict[Place, _Region] = {}
        ends: dict[int, int] = defaultdict(int)  # of each replica's slot
        for place in sorted(by_place):
            region = regions[place] = _Region(ends[place[0]])
            for rank, index in by_place[place]:
                _, destination, number, patch, elements = found[rank][index]
                offset, nbytes = region.offset + region.nbytes, elements * itemsize
                runs[rank][index] = Run(
                    place[0], destination, number, region.elements, elements, offset, nbytes
                )
                region.nbytes += nbytes
                region.elements += elements
                region.patches += (patch,)
            ends[place[0]] += region.nbytes
        return [[run for run in of_rank if run is not None] for of_rank in runs], regions

    def _share_checksums(self, bucket: int, slot: int, runs: list[Run], blocks: list[torch.Tensor]) -> None:
        """Compute the checksums of what is sent from all ranks' shares. Collective over all ranks."""
        regions = self._regions[slot]

        def compute() -> list[tuple[Place, int]]:
            shares = []
            for run, part in zip(runs, blocks, strict=True):
                place, end = (run.replica, run.number), run.start + run.elements
                shares.append(
                    (place, compute_share(part.reshape(-1), ((run.start, end),), (regions[place].elements,)))
                )
            return shares

        by_place: dict[Place, list[int]] = defaultdict(list)
        for part in agree(compute, f"bucket {bucket}: checksums"):
            for place, share in part:
                by_place[place].append(share)
        for place, shares in by_place.items():
            regions[place].checksum = combine_shares(shares, regions[place].nbytes)

    def _region(self, slot: int, place: Place) -> _Region:
        return self._regions[slot].get(place, _Region(0))
