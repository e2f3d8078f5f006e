"""Where the gradient of the output weight goes: straight into Megatron's `main_grad`, or into a buffer that
autograd gets.

Megatron's DDP gives each parameter a float32 `main_grad` and a flag `grad_added_to_main_grad`. A backward
that adds to `main_grad` itself sets the flag and returns a dummy gradient, whose only use is to make autograd
run DDP's hook for the parameter (with overlapped reduction the hook insists on a gradient). Where an
embedding on the same rank shares the weight Megatron sets `zero_out_wgrad`: the hook then adds what autograd
summed for the parameter, which must be the embedding's part alone, so no dummy is returned. Reference:
megatron/core/distributed/distributed_data_parallel.py (`_make_backward_post_hook`),
megatron/core/tensor_parallel/layers.py.
"""

import torch
from torch import Tensor

from megagrpo.ops.matmul import accumulate, statistics_dtype


class WeightGradient:
    """Accumulates dL/dweight tile by tile; only ever adds.

    Args:
        weight: [Vp, H] parameter.
        to_main_grad: add to `weight.main_grad` where the parameter has one.
    """

    def __init__(self, weight: Tensor, to_main_grad: bool):
        self.weight = weight
        main_grad = getattr(weight, "main_grad", None) if to_main_grad else None
        self.in_main_grad = main_grad is not None
        dtype = statistics_dtype(weight.dtype)
        self.buffer = (
            main_grad if self.in_main_grad else torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        )

    def add_(self, columns: slice, logit_gradient: Tensor, hidden: Tensor) -> None:
        """buffer[columns] += logit_gradient.T @ hidden, with logit_gradient [R, C] and hidden [R, H] operands
        of one type.
        """
        tile, dtype = self.buffer[columns], statistics_dtype(hidden.dtype)
        if tile.dtype == dtype:
            accumulate(tile, logit_gradient.t(), hidden)
        else:
            # A main_grad in bfloat16: the product is still formed in float32 and rounded once.
            product = torch.zeros(tile.shape, dtype=dtype, device=tile.device)
            accumulate(product, logit_gradient.t(), hidden)
            tile.add_(product)

    def autograd_result(self, scale: Tensor | None = None) -> Tensor | None:
        """What the autograd function returns for the weight.

        Args:
            scale: scalar to multiply a returned buffer by, in place; a gradient that is already in
                `main_grad` is never scaled.

        Returns:
            The gradient [Vp, H] in the weight's type; a dummy or None where it is in `main_grad` already.
        """
        if not self.in_main_grad:
            return (self.buffer if scale is None else self.buffer.mul_(scale)).to(self.weight.dtype)
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        if getattr(self.weight, "zero_out_wgrad", False):
            return None
        return torch.empty_like(self.weight)
