"""Linear layers whose three products are of float8 operands, as a recipe quantises them: in float32, to
study a recipe where no GPU has it.

    y = Q(x) Q(w)^T,   dx = Q(dy) Q(w),   dw = Q(dy)^T Q(x)

Each operand is quantised along the dimension that the product sums over, as the hardware's GEMMs want it:
blocks of x lie along the features in y and along the tokens in dw. Products and sums are float32; those of a
GPU are float32 too, rounded to bfloat16 once.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from megagrpo.ops.float8 import (
    BLOCK,
    E4M3,
    E5M2,
    DelayedScale,
    quantize_blocks,
    quantize_mx,
    quantize_tensor,
)

Operand = Literal["input", "weight", "gradient"]
RECIPES = ("fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8")
_HYBRID = ("fp8_delayed", "fp8_tensorwise")  # gradients in e5m2


class Float8Operands:
    """How the operands of one layer are quantised.

    Args:
        recipe: of RECIPES.
    """

    def __init__(self, recipe: str):
        self.recipe = recipe
        forms = {"input": E4M3, "weight": E4M3, "gradient": E5M2 if recipe in _HYBRID else E4M3}
        self._forms, self._delayed = forms, {name: DelayedScale(form) for name, form in forms.items()}

    def pair(self, matrix: torch.Tensor, operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix [R, C] as a product over C sees it, and one over R, both float32 [R, C]."""
        if not matrix.numel():  # an expert without tokens
            return matrix, matrix
        if self.recipe == "fp8_delayed":
            rounded = self._delayed[operand].quantize(matrix).dequantize()
            return rounded, rounded
        if self.recipe == "fp8_tensorwise":
            rounded = quantize_tensor(matrix, self._forms[operand]).dequantize()
            return rounded, rounded
        along = self._blocks_along(operand)
        return along(matrix), along(matrix.t().contiguous()).t()

    def _blocks_along(self, operand: Operand) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what rounds a matrix in blocks along its rows."""
        form = self._forms[operand]
        if self.recipe == "mxfp8":
            return lambda matrix: quantize_mx(matrix, form, round_up=True).dequantize()
        block = (BLOCK if operand == "weight" else 1, BLOCK)
        return lambda matrix: quantize_blocks(matrix, block, form).dequantize()


def emulated_linear(inputs: torch.Tensor, weight: torch.Tensor, operands: Float8Operands) -> torch.Tensor:
    """Return inputs [..., K] times weight [N, K], [..., N], in the inputs' dtype."""
    return _EmulatedLinear.apply(inputs, weight, operands)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, operands: Float8Operands):
        rows, rows_of_tokens = operands.pair(inputs.reshape(-1, inputs.shape[-1]), "input")
        columns, columns_of_features = operands.pair(weight, "weight")
        ctx.save_for_backward(rows_of_tokens, columns_of_features)
        ctx.operands, ctx.shape, ctx.dtype = operands, inputs.shape, weight.dtype
        return (rows @ columns.t()).view(*inputs.shape[:-1], weight.shape[0]).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        rows, rows_of_tokens = ctx.operands.pair(gradient.reshape(-1, gradient.shape[-1]), "gradient")
        of_inputs = (rows @ weight).view(ctx.shape).to(gradient.dtype)
        return of_inputs, (rows_of_tokens.t() @ inputs).to(ctx.dtype), None
