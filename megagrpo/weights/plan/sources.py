"""Where the trainer's ranks hold the model's tensors: HF tensors as boxes on the rank grid. Pure: no torch,
no process groups.

The experts of a layer are one stacked tensor [E, rows, columns] for each projection, whose first dimension is
shared out over ep. What a rule says of the HF tensors (rank r holds the r-th of tp equal slices along one
dimension) is all that is needed here; how Megatron lays these slices out inside its parameters is
`models/rules.py`'s business.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.parallel.layout import ParallelLayout
from megagrpo.weights.plan.boxes import Box, whole

if TYPE_CHECKING:
    from megagrpo.models.family import HFConfig
    from megagrpo.models.rules import ParameterRule


@dataclass(frozen=True)
class SourceTensor:
    """One HF tensor; of experts, one projection of all experts of a layer."""

    name: str  # HF name, with {expert} in it where stacked
    unit: str  # tensors of one unit are fused in an engine: they travel in one bucket
    kind: str  # the kind of its rule
    shape: tuple[int, ...]
    stage: int
    # the dimension that (expert) tensor parallel ranks split in equal slices; None: each rank holds all
    split: int | None
    split_size: int = 0  # length of that dimension, vocabulary padding included
    is_expert: bool = False
    # the torch dtype, without its prefix, in which the tensor is sent; None: that of the publish
    dtype: str | None = None
    engine: str = ""  # the engine's parameter that the unit is fused into; empty: `name`
    place: int = 0  # the tensor's place among the unit's tensors
    is_quantized: bool = False  # sent as float8 to engines that are quantised
    is_whole_in_engine: bool = False  # engine ranks never split it

    def hf_name(self, expert: int = 0) -> str:
        """Return the HF tensor's name, of a stacked one that of one expert."""
        return self.name.format(expert=expert) if self.is_expert else self.name


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same slices of a stage's tensors: first, first + stride, ... Each can send
    them.
    """

    first: int
    stride: int
    count: int

    def rank(self, index: int) -> int:
        """Return the rank of the holder `index`."""
        return self.first + self.stride * index


def holders_of(source: SourceTensor, layout: ParallelLayout) -> Iterator[tuple[Holders, Box]]:
    """Yield (holders, the box that they hold) of every distinct slice of a tensor; slices of padding alone
    are left out.
    """
    for holders in _groups(source, layout):
        if box := box_held(source, holders, layout):
            yield holders, box


def _groups(source: SourceTensor, layout: ParallelLayout) -> Iterator[Holders]:
    stage_size = layout.tp * layout.cp * layout.dp
    base = stage_size * source.stage
    if source.is_expert:
        stride = layout.expert_tp * layout.ep
        yield from (Holders(base + place, stride, stage_size // stride) for place in range(stride))
    elif source.split is None:
        yield Holders(base, 1, stage_size)
    else:
        yield from (Holders(base + shard, layout.tp, stage_size // layout.tp) for shard in range(layout.tp))


def holders_with(source: SourceTensor, rank: int, layout: ParallelLayout) -> tuple[Holders, int] | None:
    """Return the holders that `rank` belongs to, and its place among them; None where it holds nothing of
    the tensor.
    """
    stage_size = layout.tp * layout.cp * layout.dp
    if rank // stage_size != source.stage:
        return None
    within = rank % stage_size
    stride = layout.expert_tp * layout.ep if source.is_expert else 1 if source.split is None else layout.tp
    return Holders(rank - within + within % stride, stride, stage_size // stride), within // stride


def box_held(source: SourceTensor, holders: Holders, layout: ParallelLayout) -> Box | None:
    """Return the slice that these holders have; None where it is vocabulary padding alone."""
    place = holders.first % (layout.tp * layout.cp * layout.dp)
    box = list(whole(source.shape))
    shards, shard = layout.tp, place
    if source.is_expert:
        shards, shard = layout.expert_tp, place % layout.expert_tp
        each = source.shape[0] // layout.ep
        first = place // layout.expert_tp * each
        box[0] = (first, first + each)
        if source.split is None and shard:
            return None  # the first rank of those that split the expert sends what each of them holds
    if source.split is not None:
        each = source.split_size // shards
        end = source.shape[source.split]
        box[source.split] = (min(shard * each, end), min((shard + 1) * each, end))
    return None if any(start >= stop for start, stop in box) else tuple(box)


def build_sources(
    rules: Sequence["ParameterRule"], hf: "HFConfig", layout: ParallelLayout, padded_vocab_size: int
) -> list[SourceTensor]:
    """Return all tensors that a model exports, in the model's order.

    Args:
        rules: the family's.
        hf: the model's sizes.
        layout: where its layers are.
        padded_vocab_size: rows of the vocabulary that the trainer's ranks hold together.
    """
    stage_of = [
        chunk % layout.pp
        for chunk, layers in enumerate(layout.chunk_layers(hf.num_layers))
        for _ in range(layers)
    ]
    sections: dict[str, list[ParameterRule]] = {"embedding": [], "layer": [], "head": []}
    for rule in rules:
        if not rule.is_tied_copy:
            sections[rule.section].append(rule)
    places: list[tuple[ParameterRule, int | None, int]] = [(rule, None, 0) for rule in sections["embedding"]]
    places += [
        (rule, n, stage)
        for n, stage in enumerate(stage_of)
        for rule in sections["layer"]
        if n in rule.layers_of(hf.num_layers)
    ]
    places += [(rule, None, layout.pp - 1) for rule in sections["head"]]
    return [source for place in places for source in _of_rule(*place, padded_vocab_size)]


def _of_rule(
    rule: "ParameterRule", layer: int | None, stage: int, padded_vocab_size: int
) -> Iterator[SourceTensor]:
    # rules with one parameter of an engine are one unit
    unit = (rule.engine or rule.megatron).format(layer=layer, expert="{expert}")
    order = rule.engine_order or range(len(rule.hf))
    for number, (name, sizes) in enumerate(zip(rule.hf_names(layer), rule.shapes, strict=True)):
        split, shape = rule.split_dimension, tuple(map(int, sizes))
        if rule.is_expert:
            shape, split = (int(rule.num_experts), *shape), None if split is None else split + 1
        size = 0 if split is None else padded_vocab_size if rule.kind == "vocab" else shape[split]
        yield SourceTensor(
            name,
            unit,
            rule.kind,
            shape,
            stage,
            split,
            size,
            rule.is_expert,
            engine=rule.engine.format(layer=layer),
            dtype="float32" if rule.is_float32 else None,
            place=rule.engine_place + list(order).index(number),
            is_quantized=rule.is_quantized,
            is_whole_in_engine=rule.is_whole_in_engine or rule.kind == "replicated",
        )
