"""What every rank of an engine keeps of the model: its parameters, and which box of which HF tensor each part
of them is. Pure.

full      every engine rank gets the HF tensors whole, and its own loader cuts them
sharded   an engine rank gets its slices, laid out as its fused parameters are: tensors of one unit on top of
          one another, in the order and under the name that the family's rules give, experts stacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from megagrpo.weights.plan.boxes import Box, sizes, whole
from megagrpo.weights.plan.sources import SourceTensor

Layout = Literal["full", "sharded"]
VOCAB_PADDING = 64  # vLLM and SGLang pad the vocabulary to a multiple of this (and of tp)


@dataclass(frozen=True)
class EngineGrid:
    """The engines: `replicas` of `tp` ranks each. Where ep > 1 the experts are shared out over ep of them,
    and cut over tp / ep.
    """

    replicas: int = 1
    tp: int = 1
    ep: int = 1
    layout: Layout = "full"

    @property
    def destinations(self) -> int:
        """Distinct contents of one replica: its ranks, or one for all of them under `full`."""
        return self.tp if self.layout == "sharded" else 1


@dataclass(frozen=True)
class TargetPart:
    """A box of a source that an engine rank keeps, and where it begins in the rank's parameter."""

    source: str
    box: Box
    offset: tuple[int, ...]  # in `TargetTensor.grid`


@dataclass(frozen=True)
class TargetTensor:
    """One parameter of one engine rank."""

    name: str
    unit: str
    shape: tuple[int, ...]
    # the shape in which the parts are placed: `shape`, of one expert's tensor with a leading 1
    grid: tuple[int, ...]
    parts: tuple[TargetPart, ...]
    dtype: str | None = None  # None: that of the publish

    @property
    def numel(self) -> int:
        """Elements of the parameter, the engine's vocabulary padding included."""
        return prod(self.shape)


def build_targets(
    sources: Sequence[SourceTensor], grid: EngineGrid, head_dim: int
) -> list[list[TargetTensor]]:
    """Return the parameters of every destination of one replica, in the model's order."""
    units: dict[str, list[SourceTensor]] = {}
    for source in sources:
        units.setdefault(source.unit, []).append(source)
    if grid.layout == "full":
        return [[target for members in units.values() for target in _full(members)]]
    return [
        [_sharded(unit, members, rank, grid, head_dim) for unit, members in units.items()]
        for rank in range(grid.tp)
    ]


def _full(members: list[SourceTensor]) -> list[TargetTensor]:
    """Return the HF tensors of a unit; of experts one after another, so that what is fused stays together."""
    targets = []
    for expert in range(members[0].shape[0] if members[0].is_expert else 1):
        for source in members:
            box, shape, unit = whole(source.shape), source.shape, source.unit
            if source.is_expert:
                box, shape, unit = ((expert, expert + 1), *box[1:]), shape[1:], f"{unit}#{expert}"
            part = TargetPart(source.name, box, (0,) * len(box))
            targets.append(
                TargetTensor(source.hf_name(expert), unit, shape, sizes(box), (part,), source.dtype)
            )
    return targets


def _sharded(
    unit: str, members: list[SourceTensor], rank: int, grid: EngineGrid, head_dim: int
) -> TargetTensor:
    """Lay a unit's members out one after another along the dimension that they are fused along."""
    members = sorted(members, key=lambda source: source.place)
    first = members[0]
    fused_along = 1 if first.is_expert else 0
    parts, offset = [], 0
    for source in members:
        box = _box_kept(source, rank, grid, head_dim)
        place = [0] * len(source.shape)
        place[fused_along] = offset
        parts.append(TargetPart(source.name, box, tuple(place)))
        offset += sizes(box)[fused_along]
    shape = list(sizes(parts[0].box))
    shape[fused_along] = offset
    if first.kind == "vocab":
        shape[0] = padded_vocab(first.shape[0], grid.tp) // grid.tp
        parts = [part for part in parts if prod(sizes(part.box))]
    return TargetTensor(
        first.engine or first.name, unit, tuple(shape), tuple(shape), tuple(parts), first.dtype
    )


def _box_kept(source: SourceTensor, rank: int, grid: EngineGrid, head_dim: int) -> Box:
    box = list(whole(source.shape))
    if source.is_whole_in_engine:
        return tuple(box)
    if source.is_expert:
        experts, cut_over = source.shape[0] // grid.ep, grid.tp // grid.ep
        index, rank = rank // cut_over, rank % cut_over
        box[0] = (index * experts, (index + 1) * experts)
        assert source.split is not None
        each = source.shape[source.split] // cut_over
        box[source.split] = (rank * each, (rank + 1) * each)
        return tuple(box)
    assert source.split is not None, f"{source.name}: kind {source.kind} has no split"
    length = source.shape[source.split]
    if source.kind == "vocab":
        each = padded_vocab(length, grid.tp) // grid.tp
        box[0] = (min(rank * each, length), min((rank + 1) * each, length))
        return tuple(box)
    shards, shard = grid.tp, rank
    # fewer key-value heads than ranks: ranks share one
    if source.kind == "qkv" and length // head_dim < grid.tp:
        shards = length // head_dim
        shard = rank // (grid.tp // shards)
    each = length // shards
    box[source.split] = (shard * each, (shard + 1) * each)
    return tuple(box)


def padded_vocab(size: int, tp: int) -> int:
    """Return the vocabulary rows that an engine of `tp` ranks holds, padding included."""
    padded = -(-size // VOCAB_PADDING) * VOCAB_PADDING
    return -(-padded // tp) * tp
