"""Blockwise float8 linear layers for vLLM on any CPU: its own kernels need AMX, and pack the weights so that
no new ones can be loaded.

The weight is multiplied out to the activations' dtype in every call: right and slow, to run and test an fp8
model where there is no GPU.
"""

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.platforms.interface import PlatformEnum


class PlainFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """x @ (weight * scale of its block).T in plain torch."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Say that any CPU can."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the parameters as checkpoints have them."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Return x [..., K] times the weight [N, K], multiplied out."""
        rows, columns = self.weight_group_shape
        scales = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        weight = layer.weight.float() * scales[: layer.weight.shape[0], : layer.weight.shape[1]]
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Never called: `apply_weights` does all of it."""
        raise NotImplementedError


def install() -> None:
    """Have vLLM take it on CPUs."""
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, PlainFp8BlockKernel)
