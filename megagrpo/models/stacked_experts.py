"""Experts that an HF folder stores stacked: `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H,
I], one tensor a layer.

That is how transformers 5 holds them and writes them with `save_original_format=False`. The hub's
checkpoints, our rules and our exports have one tensor for each expert and projection; `ParameterRule.stacked`
names the tensor that those are read from here.
"""

from typing import Any

import torch

from megagrpo.errors import UserError
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.rules import ParameterRule


def stacked_rules(hf: HFConfig) -> dict[str, tuple[ParameterRule, int | None]]:
    """Return the rule and the layer of every stacked tensor that a model may be stored as, by its name."""
    return {
        rule.stacked.format(layer=layer): (rule, layer)
        for rule in FAMILIES.get(hf.model_type).parameter_rules(hf)
        if rule.stacked
        for layer, expert in rule.places(hf.num_layers)
        if not expert
    }


class StackedExpertSlice:
    """One of an expert's tensors in a stacked one, read like a safetensors slice: only the rows and columns
    that are asked for.

    Args:
        stacked: safetensors slice [experts, rows, columns].
        rule: of the expert's parameter.
        expert: global index.
        place: of the tensor among those of the rule.

    Raises:
        UserError: it is stacked of another number of experts.
    """

    def __init__(self, stacked: Any, rule: ParameterRule, expert: int, place: int):
        experts, rows, columns = stacked.get_shape()
        if experts != rule.num_experts:
            raise UserError(
                f"model.path: {rule.stacked}: holds {experts} experts, config.json says num_experts "
                f"{rule.num_experts}"
            )
        self.stacked, self.expert = stacked, expert
        self.shape = [rows // len(rule.hf), columns]
        self.first_row = self.shape[0] * place

    def get_shape(self) -> list[int]:
        """Return [rows, columns]."""
        return self.shape

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        """Read `[rows]` or `[rows, columns]`, slices with step 1."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self.shape[0])
        return self.stacked[
            self.expert : self.expert + 1, self.first_row + start : self.first_row + stop, columns
        ][0]
