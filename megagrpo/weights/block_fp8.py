"""Blockwise float8 of a box of a tensor, given nothing but the box: blocks are those of the whole tensor.

Row bands of a block's height are worked on one by one: what is needed beside the result is one band in
float32.
"""

from collections.abc import Iterator

import torch

from megagrpo.config.schema import FP8_BLOCK
from megagrpo.weights.boxes import Box

FP8_MAX = 448.0  # largest finite float8_e4m3fn
SMALLEST_AMAX = 1e-4  # of a block, so that a block of zeros has a scale


def accumulate_amax(tensor: torch.Tensor, box: Box, amax: torch.Tensor) -> None:
    """Raise blocks' maxima to those of a slice, in place.

    Args:
        tensor: [rows, columns], the slice.
        box: where it lies in the whole tensor.
        amax: float32 [row blocks, column blocks], of the whole tensor.
    """
    columns = _column_blocks(box, tensor.device)
    for block, rows in _bands(box):
        of_columns = tensor[rows].abs().amax(0).float()
        amax[block].scatter_reduce_(0, columns, of_columns, "amax")


def compute_scales(amax: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks, float32 as `amax`."""
    return amax.clamp(min=SMALLEST_AMAX) / FP8_MAX


def quantize_slice(tensor: torch.Tensor, box: Box, scales: torch.Tensor) -> torch.Tensor:
    """Return a slice as float8_e4m3fn [rows, columns]; see `accumulate_amax`. Values that are not finite
    become NaN.
    """
    quantized = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
    columns = _column_blocks(box, tensor.device)
    for block, rows in _bands(box):
        quantized[rows] = (tensor[rows].float() * (1.0 / scales[block])[columns]).to(torch.float8_e4m3fn)
    return quantized


def _column_blocks(box: Box, device: torch.device) -> torch.Tensor:
    """Return the column block of each of the box's columns."""
    return torch.arange(*box[1], device=device) // FP8_BLOCK


def _bands(box: Box) -> Iterator[tuple[int, slice]]:
    """Yield (row block, rows of the slice in it)."""
    first, last = box[0]
    for block in range(first // FP8_BLOCK, -(-last // FP8_BLOCK)):
        yield block, slice(max(block * FP8_BLOCK, first) - first, min((block + 1) * FP8_BLOCK, last) - first)
