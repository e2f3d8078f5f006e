"""What of the weights a publish sends: what is sent of a bucket, the contract of what chooses it, and
everything. How it gets there is a transport's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megagrpo.weights.context import PublishContext
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.wire.bucket_manifest import Patch, TensorEntry

NO_CHECKSUM = "00000000"  # the checksum of nothing

Place = tuple[int, int]  # replica, number of a parameter in the bucket's layout


@dataclass(frozen=True)
class SlotRun:
    """Neighbouring bytes of a slot that one rank has: blocks of a parameter that changed."""

    replica: int
    destination: int
    number: int  # the parameter's place in the bucket's layout
    start: int  # element of all that is sent of the parameter
    elements: int
    offset: int  # in the slot
    nbytes: int

    @property
    def place(self) -> Place:
        """The parameter that it belongs to."""
        return self.replica, self.number


@dataclass
class Region:
    """What is sent of one parameter."""

    offset: int  # in the slot
    nbytes: int = 0
    elements: int = 0
    patches: tuple[Patch, ...] = ()
    checksum: str = NO_CHECKSUM


@dataclass(frozen=True)
class SelectedBlocks:
    """Blocks that are sent in place of slices, those of a parameter one after another."""

    runs: Sequence[Sequence[SlotRun]]  # every rank's, by rank
    blocks: Sequence[torch.Tensor]  # this rank's, of any shape, one for each of its runs
    regions: Mapping[Place, Region]

    def region(self, place: Place) -> Region:
        """Return what is sent of a parameter; nothing, where nothing of it changed."""
        return self.regions.get(place, Region(0))


@dataclass(frozen=True)
class SelectedBucket:
    """What is sent of one bucket."""

    number: int  # the bucket's place in the plan
    sends: Sequence[Transfer]  # this rank's slices; none where blocks are sent
    planned_bytes: int  # all slices of the bucket that this rank has for the replicas
    nbytes: int  # what is sent of them
    base: int | None = None  # the engine holds this version, and keeps what is not sent; None: all is sent
    left_out: frozenset[int] = frozenset()  # positions of parameters that are not sent; of layout `full`
    blocks: SelectedBlocks | None = None

    def without_blocks(self) -> "SelectedBucket":
        """Return the same without this rank's blocks, once they are written: they take memory."""
        return self if self.blocks is None else replace(self, blocks=replace(self.blocks, blocks=()))

    def keep(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Return those of a bucket's transfers that are sent as slices."""
        if self.blocks is not None:
            return []
        return [transfer for transfer in transfers if transfer.target not in self.left_out]

    def describe(self, entry: TensorEntry, position: int, place: Place) -> TensorEntry:
        """Turn a parameter's entry for all of it into the entry for what is sent of it.

        Args:
            position: of the parameter, in its destination's list.
        """
        if self.blocks is not None:
            region = self.blocks.region(place)
            return replace(entry, offset=region.offset, nbytes=region.nbytes, patches=region.patches)
        if position in self.left_out:
            return replace(entry, offset=0, nbytes=0, checksum=NO_CHECKSUM, patches=())
        return entry


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
        """The version that engines must hold for changes alone to bring them to the next one; None: no
        version is enough.
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
        """Note that all replicas of this publish hold `version`."""

    def abort(self) -> None:  # noqa: B027
        """Note that the publish failed: nobody knows what the engines hold."""

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
