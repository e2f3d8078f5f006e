"""Blockwise float8 of the weights on their way: which tensors travel so, and the arithmetic of a slice.

    scale_b = max(amax_b, 1e-4) / 448,   q = float8_e4m3fn(w * (1 / scale_b))

of a block b of 128 x 128 of the whole HF tensor (DeepGEMM's `per_block_cast_to_fp8`, which vLLM uses too; 448
is the largest e4m3fn number). A block may lie on several ranks. Only its maximum has to be known on
all of them: tensor parallel ranks reduce their maxima of a bucket (1 float32 for 16,384 elements), then each
quantises the slices that it sends. The bytes that travel are float8, and the same for every layout of the
trainer.

A slice is worked on in row bands of a block's height: beside the result it needs one band in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megagrpo.config.engine_sections import FP8_BLOCK
from megagrpo.models.quantization import scale_name, scale_shape
from megagrpo.weights.plan.boxes import Box
from megagrpo.weights.plan.sources import SourceTensor

FP8_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "float32"
FP8_MAX = 448.0  # largest finite float8_e4m3fn
SMALLEST_AMAX = 1e-4  # what a block's amax is at least, so that a block of zeros has a scale


def quantize_sources(sources: Sequence[SourceTensor]) -> Iterator[SourceTensor]:
    """Yield the tensors of the quantised checkpoint: float8 weights, each followed by its scales, and all
    others.

    Scales are known to all ranks that hold a slice of their weight.
    """
    for source in sources:
        if not source.is_quantized:
            yield source
            continue
        yield replace(source, dtype=FP8_DTYPE)
        yield replace(
            source,
            name=scale_name(source.name),
            kind="replicated",
            shape=scale_shape(source.shape),
            split=None,
            split_size=0,
            dtype=SCALE_DTYPE,
            is_quantized=False,
        )


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
