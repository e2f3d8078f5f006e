"""GEMMs with float32 results from operands of any float type.

A bfloat16 GEMM that also rounds its result to bfloat16 would cost the log-probs three decimal digits.
Accelerators can keep the float32 accumulator (`out_dtype`); CPUs can't, and multiply float32 faster than
bfloat16 anyway, so there the operands are widened tile by tile.
"""

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of logits and row statistics: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_operand(tensor: Tensor) -> Tensor:
    """`tensor` in the type the device multiplies it in: widened to float32 on a CPU, as it is on an
    accelerator.
    """
    return tensor.to(statistics_dtype(tensor.dtype)) if tensor.device.type == "cpu" else tensor


def multiply_transposed(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Out = scale * left @ right.T, with out [R, C] in float32 or wider, left [R, H], right [C, H]
    operands.
    """
    if left.dtype == out.dtype:
        torch.addmm(out, left, right.t(), beta=0, alpha=scale, out=out)
    else:
        torch.ops.aten.mm.dtype_out(left, right.t(), out.dtype, out=out)
        out.mul_(scale)


def accumulate(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Out += left @ right, with out [M, N] in float32 or wider; left [M, K] is rounded to the type of
    right [K, N].
    """
    if right.dtype == out.dtype:
        out.addmm_(left, right)
    else:
        torch.ops.aten.addmm.dtype_out(out, left.to(right.dtype), right, out.dtype, out=out)
