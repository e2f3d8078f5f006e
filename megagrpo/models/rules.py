"""All that is known of one Megatron parameter and the Hugging Face tensors that it is made of.

A family lists `ParameterRule`s. A rule gives the tensors' names and shapes, how they are split over tensor
parallel ranks, where they lie in the model, how rollout engines fuse them and whether engines quantise them.
Import, export, weight publishing, quantisation and conversion read this list and know of no other names.

Every kind is described by plain splits of its HF tensors: rank r of tp holds, of each HF tensor, the r-th of
tp equal slices along one dimension; `merge` lays these local slices out as Megatron stores them and `split`
is its inverse. So a rank reads only its slices from disk, and a publisher sends only slices.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["replicated", "column", "row", "vocab", "qkv", "gate_up"]
SPLIT_DIMENSION: dict[str, int | None] = {
    "replicated": None,
    "column": 0,
    "row": 1,
    "vocab": 0,
    "qkv": 0,
    "gate_up": 0,
}


Section = Literal["embedding", "layer", "head"]


class Size(int):
    """A length of a tensor, with the fields of config.json that it follows from: errors name them."""

    fields: str

    def __new__(cls, value: int, fields: str = "") -> "Size":
        """Make the number `value`."""
        size = super().__new__(cls, value)
        size.fields = fields
        return size


@dataclass(frozen=True)
class ParameterRule:
    """One Megatron parameter and its HF tensors.

    In names `{layer}` stands for the global layer index and `{expert}` for the global expert index.

    Attributes:
        megatron: the parameter's name.
        hf: the HF tensors' names, in the order in which Megatron lays them out.
        kind: how they are split over tp, and how Megatron lays the slices out.
        shapes: of the whole HF tensors (of one expert), in the order of `hf`.
        section: which pipeline stage holds it: the first, that of its layer, or the last.
        engine: the parameter of a rollout engine that the tensors are fused into, of experts one for all of a
            layer; empty: the HF name.
        engine_order: positions in `hf` as the tensors lie in it, first to last; empty: as in `hf`.
        is_quantized: a quantised engine keeps it as blockwise float8.
        num_experts: experts of a layer. Above 0 the parameter lives on one expert parallel rank and is split
            over expert tensor parallel ranks instead of tp.
        stacked: the HF tensor [experts, rows of all in the order of `hf`, columns] that some folders hold
            instead; empty: none do.
        is_tied_copy: the same tensor as that of another rule, on another stage: it is read, never sent.
        layers: global indices of the layers that have it; None: all of them.
        engine_place: where the tensors lie among those of another rule with the same `engine`.
        is_whole_in_engine: each engine rank holds all of it, however the trainer splits it.
        is_float32: it is kept, written and sent in float32 whatever the format of the model.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    section: Section = "layer"
    engine: str = ""
    engine_order: tuple[int, ...] = ()
    is_quantized: bool = False
    num_experts: int = 0
    stacked: str = ""
    is_tied_copy: bool = False
    layers: range | None = None
    engine_place: int = 0
    is_whole_in_engine: bool = False
    is_float32: bool = False

    def __post_init__(self) -> None:
        assert len(self.hf) == len(self.shapes), f"{self.megatron}: {self.hf} have shapes {self.shapes}"
        assert len(self.hf) == 1 or self.engine, f"{self.megatron}: no name of what an engine fuses them into"
        assert sorted(self.engine_order) in ([], list(range(len(self.hf)))), f"{self.megatron}: engine_order"

    @property
    def is_expert(self) -> bool:
        """Say whether each expert has a parameter of its own."""
        return self.num_experts > 0

    @property
    def split_dimension(self) -> int | None:
        """Dimension along which the HF tensors are split over tensor parallel ranks; None where each rank
        holds all.
        """
        return SPLIT_DIMENSION[self.kind]

    def hf_names(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """Return the HF tensor names at a global layer index (None outside the layers) and of a global expert
        index; without one `{expert}` stays in them.
        """
        index = "{expert}" if expert is None else expert
        return tuple(name.format(layer=layer, expert=index) for name in self.hf)

    def layers_of(self, num_layers: int) -> range:
        """Return the layers, of a model of `num_layers`, that have this parameter."""
        return range(num_layers) if self.layers is None else self.layers

    def places(self, num_layers: int) -> Iterator[tuple[int | None, int | None]]:
        """Yield (layer, expert) of every parameter of this rule; None where there is no such index."""
        for layer in self.layers_of(num_layers) if self.section == "layer" else [None]:
            for expert in range(self.num_experts) if self.is_expert else [None]:
                yield layer, expert


@dataclass(frozen=True)
class Dimensions:
    """The sizes that the rules need."""

    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int


def merge(rule: ParameterRule, parts: list[torch.Tensor], dims: Dimensions, tp: int) -> torch.Tensor:
    """Lay one rank's slices of the HF tensors out as the Megatron parameter of that rank.

    `qkv` is interleaved by query group: for each group its query heads, then its key head, then its value
    head.
    """
    if rule.kind == "qkv":
        groups = dims.num_query_groups // tp
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).reshape(
            -1, *parts[0].shape[1:]
        )
    if rule.kind == "gate_up":
        return torch.cat(parts)
    return parts[0]


def split(rule: ParameterRule, parameter: torch.Tensor, dims: Dimensions, tp: int) -> list[torch.Tensor]:
    """Return one rank's slices of the HF tensors: the inverse of `merge`. Views where the layout allows
    it.
    """
    if rule.kind == "qkv":
        groups = dims.num_query_groups // tp
        queries = dims.num_attention_heads // dims.num_query_groups * dims.head_dim
        by_group = parameter.reshape(groups, queries + 2 * dims.head_dim, *parameter.shape[1:])
        return [
            part.reshape(-1, *parameter.shape[1:])
            for part in by_group.split([queries, dims.head_dim, dims.head_dim], dim=1)
        ]
    if rule.kind == "gate_up":
        return list(parameter.chunk(2))
    return [parameter]


class RuleTable:
    """Finds the rule of a Megatron parameter name."""

    def __init__(self, rules: Iterable[ParameterRule]):
        self.rules = list(rules)
        self._by_name = {rule.megatron: rule for rule in self.rules}

    def find(self, name: str) -> tuple[ParameterRule, int | None, int | None]:
        """Return (rule, layer, expert) of a Megatron parameter whose name carries global indices; None where
        it carries none.

        Raises:
            KeyError: no rule names this parameter.
        """
        indices: dict[str, int] = {}

        def note(found: re.Match[str]) -> str:
            key = "expert" if found[1] == "local_experts." else "layer"
            indices[key] = int(found[2])
            return f"{found[1]}{{{key}}}"

        template = re.sub(r"(?<=\.)(layers\.|local_experts\.)(\d+)", note, name)
        if template not in self._by_name:
            raise KeyError(f"no parameter rule for {name}")
        return self._by_name[template], indices.get("layer"), indices.get("expert")
