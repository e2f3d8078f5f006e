"""How one Megatron parameter maps to Hugging Face tensors, in both directions.

A family lists `ParameterRule`s. A rule says which HF tensors a Megatron parameter is made of and how they are
split over tensor parallel ranks, nothing else. Import, export, weight publishing and conversion all read the
same list.

Every kind is described by plain splits of its HF tensors: rank r of tp holds, of each HF tensor, the r-th of
tp equal slices along one dimension; `merge` lays these local slices out as Megatron stores them and `split`
is its inverse. So a rank reads only its slices from disk, and a publisher sends only slices.
"""

import re
from collections.abc import Iterable
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


@dataclass(frozen=True)
class ParameterRule:
    """One Megatron parameter (`{layer}` stands for the global layer index, experts are numbered globally)
    and its HF tensors.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    # lives on one expert parallel rank, split over expert tensor parallel ranks instead of tp
    is_expert: bool = False

    @property
    def split_dimension(self) -> int | None:
        """Dimension along which the HF tensors are split over tensor parallel ranks; None where each rank
        holds all.
        """
        return SPLIT_DIMENSION[self.kind]

    def hf_names(self, layer: int | None) -> tuple[str, ...]:
        """Return the HF tensor names for a global layer index (None for parameters outside the layers)."""
        return tuple(name.format(layer=layer) for name in self.hf)


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

    def find(self, name: str) -> tuple[ParameterRule, int | None]:
        """Return the rule and the global layer index of a Megatron parameter whose name carries the global
        layer index.

        Raises:
            KeyError: no rule names this parameter.
        """
        layer = re.search(r"(?<=\.layers\.)\d+", name)
        template = name if layer is None else f"{name[: layer.start()]}{{layer}}{name[layer.end() :]}"
        if template not in self._by_name:
            raise KeyError(f"no parameter rule for {name}")
        return self._by_name[template], None if layer is None else int(layer.group())
