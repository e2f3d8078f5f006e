"""Sends what changed since the version that the engines have, by any transport.

sharded   blocks: the engine's rank lays them over its parameters. They lie compactly in a slot, those of a
          parameter one after another.
full      whole tensors, those of which a bit changed: the engine's own loader takes nothing less, and a copy
          of every HF tensor on the engine's side, to lay blocks over, would take as much memory as the model.

Where the engines do not all hold the version that the tracker remembers, everything is sent, and remembered.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from megagrpo.parallel.plain_data import exchangeable
from megagrpo.weights.context import PublishContext
from megagrpo.weights.partial_checksums import combine_shares, compute_share
from megagrpo.weights.publisher import agree
from megagrpo.weights.selection.base import Place, Region, SelectedBlocks, SelectedBucket, Selection, SlotRun
from megagrpo.weights.selection.change_tracker import Change, ChangeTracker
from megagrpo.wire.bucket_manifest import Patch

exchangeable(Patch)

Found = tuple[int, int, int, Patch, int]  # replica, destination, number, patch, elements of a change


class Changes(Selection):
    """What changed, where that is enough."""

    def __init__(self, context: PublishContext):
        super().__init__(context)
        self.tracker = ChangeTracker(context)
        self._base: int | None = None  # the version that the replicas hold; None: they get everything

    @property
    def base_version(self) -> int | None:
        """The version that engines must hold for changes to be enough."""
        return self.tracker.version

    def open(self, replicas: Sequence[int], base_version: int | None = None) -> None:
        """Begin a publish of what changed since `base_version`; of everything if it is None."""
        super().open(replicas, base_version)
        self._base = base_version

    def select(self, bucket: int) -> SelectedBucket:
        """Return what changed of a bucket, or all of it; remember its slices. Collective over all ranks."""
        try:
            if self._base is None:
                return self._select_all(bucket)
            if self.context.plan.grid.layout == "sharded":
                return self._select_blocks(bucket)
            return self._select_tensors(bucket)
        finally:
            self.context.reader.forget()

    def commit(self, version: int) -> None:
        """Remember what was published."""
        self.tracker.commit(version)

    def abort(self) -> None:
        """Send everything in the next publish."""
        self.tracker.abort()

    def _select_all(self, bucket: int) -> SelectedBucket:
        """Remember all slices. Collective over all ranks: where there is no memory for them on one, none goes
        on to write.
        """
        sends = self._sends(bucket)

        def note() -> None:
            for transfer in sends:
                self.tracker.note(transfer)

        agree(note, f"bucket {bucket}: slices to compare with")
        nbytes = self._bytes(sends)
        return SelectedBucket(bucket, sends, nbytes, nbytes)

    def _select_tensors(self, bucket: int) -> SelectedBucket:
        """Leave out the tensors that no rank has changes of. Collective over all ranks."""
        sends = self._sends(bucket)
        found = agree(
            lambda: {transfer.target for transfer in sends if self.tracker.is_changed(transfer)},
            f"bucket {bucket}: changes",
        )
        changed = set[int]().union(*found)
        planned = self.context.plan.buckets[bucket]
        left_out = frozenset(range(planned.first, planned.last)).difference(changed)
        kept = [transfer for transfer in sends if transfer.target not in left_out]
        return SelectedBucket(
            bucket, kept, self._bytes(sends), self._bytes(kept), self._base, left_out=left_out
        )

    def _select_blocks(self, bucket: int) -> SelectedBucket:
        """Find the blocks that changed, and give them their places, one parameter behind the other.
        Collective over all ranks.
        """
        layout, sends, changes = self.context.layouts[bucket], self._sends(bucket), list[Change]()
        numbers = layout.numbers

        def find() -> list[Found]:
            for transfer in sends:
                grid = layout.find(transfer.destination, transfer.target).target.grid
                changes.extend(self.tracker.changes(transfer, grid))
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

        found = agree(find, f"bucket {bucket}: changes")
        runs, regions = _lay_out(found, self.context.dtype.itemsize)
        blocks = [change.blocks for change in changes]
        _compute_checksums(bucket, runs[self.context.rank], blocks, regions)
        return SelectedBucket(
            bucket,
            (),
            self._bytes(sends),
            sum(part.nbytes for part in blocks),
            self._base,
            blocks=SelectedBlocks(runs, blocks, regions),
        )


def _lay_out(found: list[list[Found]], itemsize: int) -> tuple[list[list[SlotRun]], dict[Place, Region]]:
    """Give every change of every rank its place in its replica's slot, by parameter and then by rank."""
    runs: list[list[SlotRun | None]] = [[None] * len(changes) for changes in found]
    by_place: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for rank, changes in enumerate(found):
        for index, (replica, _, number, _, _) in enumerate(changes):
            by_place[replica, number].append((rank, index))
    regions: dict[Place, Region] = {}
    ends: dict[int, int] = defaultdict(int)  # where each replica's slot is filled up to
    for place in sorted(by_place):
        region = regions[place] = Region(ends[place[0]])
        for rank, index in by_place[place]:
            _, destination, number, patch, elements = found[rank][index]
            offset, nbytes = region.offset + region.nbytes, elements * itemsize
            runs[rank][index] = SlotRun(
                place[0], destination, number, region.elements, elements, offset, nbytes
            )
            region.nbytes += nbytes
            region.elements += elements
            region.patches += (patch,)
        ends[place[0]] += region.nbytes
    return [[run for run in of_rank if run is not None] for of_rank in runs], regions


def _compute_checksums(
    bucket: int, runs: list[SlotRun], blocks: list[torch.Tensor], regions: dict[Place, Region]
) -> None:
    """Compute the checksums of what is sent from all ranks' shares. Collective over all ranks.

    Args:
        runs: this rank's, as `blocks`.
        regions: get their checksums.
    """

    def compute() -> list[tuple[Place, int]]:
        return [
            (
                run.place,
                compute_share(
                    part.reshape(-1),
                    ((run.start, run.start + run.elements),),
                    (regions[run.place].elements,),
                ),
            )
            for run, part in zip(runs, blocks, strict=True)
        ]

    by_place: dict[Place, list[int]] = defaultdict(list)
    for part in agree(compute, f"bucket {bucket}: checksums"):
        for place, share in part:
            by_place[place].append(share)
    for place, shares in by_place.items():
        regions[place].checksum = combine_shares(shares, regions[place].nbytes)
