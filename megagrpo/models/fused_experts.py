"""Experts that an HF folder stores fused: `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H,
I], one tensor a layer.

That is how transformers 5 holds them and writes them with `save_original_format=False`. The hub's
checkpoints, our rules and our exports have one tensor for each expert and projection; those names are served
from the fused tensors here.
"""

import re
from collections.abc import Collection
from typing import Any

import torch

_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


class FusedExpertSlice:
    """One expert's projection in a fused tensor, read like a safetensors slice: only the rows and columns
    that are asked for.
    """

    def __init__(self, fused: Any, expert: int, projection: str):
        experts, rows, columns = fused.get_shape()
        assert expert < experts, f"expert {expert} of {experts}"
        self.fused, self.expert = fused, expert
        self.shape = [rows // 2 if projection in ("gate", "up") else rows, columns]
        self.first_row = self.shape[0] if projection == "up" else 0

    def get_shape(self) -> list[int]:
        """Return [rows, columns]."""
        return self.shape

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        """Read `[rows]` or `[rows, columns]`, slices with step 1."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self.shape[0])
        return self.fused[
            self.expert : self.expert + 1, self.first_row + start : self.first_row + stop, columns
        ][0]


def fused_name(name: str, stored: Collection[str]) -> tuple[str, int, str] | None:
    """Return (fused tensor among `stored`, expert, projection) that holds the tensor `name`; None where
    there is none.
    """
    single = _SINGLE.fullmatch(name)
    if single is None:
        return None
    prefix, expert, projection = single.groups()
    fused = f"{prefix}.{'down' if projection == 'down' else 'gate_up'}_proj"
    return (fused, int(expert), projection) if fused in stored else None


def single_names(name: str, num_experts: int) -> list[str]:
    """Return the names that a fused tensor stands for; its own name where it is not fused."""
    fused = _FUSED.fullmatch(name)
    if fused is None:
        return [name]
    projections = ("down",) if fused[2] == "down" else ("gate", "up")
    return [
        f"{fused[1]}.{expert}.{projection}_proj.weight"
        for expert in range(num_experts)
        for projection in projections
    ]
