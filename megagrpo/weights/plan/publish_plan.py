"""Who sends which slice to whom: the plan of a publish. Pure and the same on every rank; each asks for its
own view only.

Buckets     the engine's parameters in the model's order, cut where the fullest engine rank would exceed
            `bucket_bytes`; a unit (parameters that an engine fuses) is never cut, so one that is larger is a
            bucket of its own.
Pieces      a box that some trainer ranks hold, cut with a box that some engine rank keeps.
Senders     the n holders of a slice share a bucket's work evenly: all its pieces, for replica 0, 1, ..., are
            laid on a line, and holder h sends the h-th of n equal parts. Where n divides the replicas that
            is whole replicas, else pieces are cut between rows.

Every element that an engine rank keeps is sent to it exactly once, by one rank that holds it, and nothing
else is.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megagrpo.parallel.layout import ParallelLayout
from megagrpo.weights.plan.boxes import Box, cut, intersect, numel, origin, shift
from megagrpo.weights.plan.sources import Holders, SourceTensor, box_held, holders_of, holders_with
from megagrpo.weights.plan.targets import EngineGrid, TargetTensor, build_targets

# bytes of an element, of tensors that have a dtype of their own
ITEMSIZES = {"float8_e4m3fn": 1, "float32": 4}


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together: positions first .. last - 1 of every destination's list."""

    index: int
    first: int
    last: int
    nbytes: int  # what the fullest destination gets of it


@dataclass(frozen=True)
class Transfer:
    """A box on its way from a trainer rank to an engine rank."""

    sender: int
    replica: int
    destination: int  # engine rank of the replica; 0 under `full`
    target: int  # position in the destination's list of parameters
    source: str
    box: Box  # in the source's coordinates
    place: Box  # in the target's grid

    @property
    def numel(self) -> int:
        """Elements sent."""
        return numel(self.box)


@dataclass(frozen=True)
class _Piece:
    destination: int
    target: int
    source: str
    box: Box
    shift: tuple[int, ...]  # place = box + shift
    elements: int


class PublishPlan:
    """The plan of publishing a model from a trainer's grid to an engine grid.

    Args:
        sources: the model's tensors on the trainer's grid.
        trainer: that grid.
        grid: the engines.
        head_dim: of an attention head.
        itemsize: bytes of an element on its way, where a tensor has no dtype of its own.
        bucket_bytes: limit of a bucket on one engine rank.
    """

    def __init__(
        self,
        sources: Sequence[SourceTensor],
        trainer: ParallelLayout,
        grid: EngineGrid,
        head_dim: int,
        itemsize: int,
        bucket_bytes: int,
    ):
        self.sources = {source.name: source for source in sources}
        self.trainer, self.grid, self.itemsize, self.bucket_bytes = trainer, grid, itemsize, bucket_bytes
        self.targets: list[list[TargetTensor]] = build_targets(sources, grid, head_dim)
        self.buckets = self._cut_buckets()
        # source -> (destination, target, part)
        self._users: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for destination, targets in enumerate(self.targets):
            for position, target in enumerate(targets):
                for number, part in enumerate(target.parts):
                    self._users[part.source].append((destination, position, number))

    @cached_property
    def hash(self) -> str:
        """A digest of everything that the plan follows from: equal on two sides that will act alike."""
        inputs = (
            tuple(self.sources.values()),
            self.trainer,
            self.grid,
            self.itemsize,
            self.bucket_bytes,
            self.targets,
        )
        return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]

    def _cut_buckets(self) -> tuple[Bucket, ...]:
        buckets: list[Bucket] = []
        first, fill = 0, [0] * len(self.targets)
        for begin, end in _units(self.targets[0]):
            added = [
                sum(self.target_bytes(target) for target in targets[begin:end]) for targets in self.targets
            ]
            if begin > first and max(a + b for a, b in zip(fill, added, strict=True)) > self.bucket_bytes:
                buckets.append(Bucket(len(buckets), first, begin, max(fill)))
                first, fill = begin, [0] * len(self.targets)
            fill = [a + b for a, b in zip(fill, added, strict=True)]
        return (*buckets, Bucket(len(buckets), first, len(self.targets[0]), max(fill)))

    def target_bytes(self, target: TargetTensor) -> int:
        """Return the bytes of a parameter of an engine rank."""
        return target.numel * self._itemsize_of(target)

    def transfer_bytes(self, transfer: Transfer) -> int:
        """Return the bytes of a transfer."""
        return transfer.numel * self._itemsize_of(self.sources[transfer.source])

    def _itemsize_of(self, tensor: SourceTensor | TargetTensor) -> int:
        return self.itemsize if tensor.dtype is None else ITEMSIZES[tensor.dtype]

    def sources_of(self, bucket: Bucket) -> list[SourceTensor]:
        """Return the sources that a bucket is made of, each once, in order."""
        names = {
            part.source: None
            for target in self.targets[0][bucket.first : bucket.last]
            for part in target.parts
        }
        for targets in self.targets[1:]:
            for target in targets[bucket.first : bucket.last]:
                names.update(dict.fromkeys(part.source for part in target.parts))
        return [self.sources[name] for name in names]

    def sends(self, bucket: Bucket, rank: int) -> list[Transfer]:
        """Return what trainer rank `rank` sends of a bucket, in order."""
        shares: dict[Holders, tuple[int, list[SourceTensor]]] = {}
        for source in self.sources_of(bucket):
            if found := holders_with(source, rank, self.trainer):
                shares.setdefault(found[0], (found[1], []))[1].append(source)
        return [
            transfer
            for holders, (index, sources) in shares.items()
            for transfer in self._share(holders, index, self._pieces(bucket, holders, sources))
        ]

    def receives(self, bucket: Bucket, replica: int, destination: int) -> list[Transfer]:
        """Return what an engine rank gets of a bucket, sender by sender; in the same order as each
        sender's `sends`.
        """
        lines: dict[Holders, list[SourceTensor]] = defaultdict(list)
        for source in self.sources_of(bucket):
            for holders, _ in holders_of(source, self.trainer):
                lines[holders].append(source)
        found = []
        for holders, sources in lines.items():
            pieces = self._pieces(bucket, holders, sources)
            if not any(piece.destination == destination for piece in pieces):
                continue
            for index in _holders_serving(replica, self.grid.replicas, holders.count):
                share = self._share(holders, index, pieces, replica)
                found += [transfer for transfer in share if transfer.destination == destination]
        return sorted(found, key=lambda transfer: transfer.sender)  # stable: each sender's order is kept

    def _pieces(self, bucket: Bucket, holders: Holders, sources: Sequence[SourceTensor]) -> list[_Piece]:
        """Return what the holders send of a bucket to one replica."""
        pieces = []
        for source in sources:
            held = box_held(source, holders, self.trainer)
            if held is None:
                continue
            for destination, position, number in self._users[source.name]:
                if not bucket.first <= position < bucket.last:
                    continue
                part = self.targets[destination][position].parts[number]
                if box := intersect(held, part.box):
                    move = tuple(to - start for to, start in zip(part.offset, origin(part.box), strict=True))
                    pieces.append(_Piece(destination, position, source.name, box, move, numel(box)))
        return pieces

    def _share(
        self, holders: Holders, index: int, pieces: list[_Piece], only: int | None = None
    ) -> Iterator[Transfer]:
        """Yield the holder's part of the line: elements index / count to (index + 1) / count of all
        replicas' pieces.
        """
        per_replica = sum(piece.elements for piece in pieces)
        total, count = per_replica * self.grid.replicas, holders.count
        start, stop = index * total, (index + 1) * total  # counted in parts of an element, 1 / count each
        replicas = (
            range(start // (per_replica * count), -(-stop // (per_replica * count)))
            if per_replica
            else range(0)
        )
        for replica in replicas if only is None else [only]:
            position = replica * per_replica * count
            for piece in pieces:
                length = piece.elements * count
                box = (
                    cut(piece.box, start - position, stop - position, length)
                    if position < stop and position + length > start
                    else None
                )
                position += length
                if box:
                    place = shift(box, piece.shift)
                    yield Transfer(
                        holders.rank(index),
                        replica,
                        piece.destination,
                        piece.target,
                        piece.source,
                        box,
                        place,
                    )


def _units(targets: Sequence[TargetTensor]) -> Iterator[tuple[int, int]]:
    """Yield the (first, last + 1) positions of every run of parameters of one unit."""
    begin = 0
    for position in range(1, len(targets) + 1):
        if position == len(targets) or targets[position].unit != targets[begin].unit:
            yield begin, position
            begin = position


def _holders_serving(replica: int, replicas: int, count: int) -> range:
    """Return which of `count` holders have a part of this replica on their stretch of the line."""
    return range(replica * count // replicas, -(-(replica + 1) * count // replicas))
