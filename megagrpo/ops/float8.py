"""float8 as training recipes use it, in plain torch: scales, rounding, and back.

    q = saturate(round(x * s)),   x' = q * (1 / s)

in e4m3 (largest 448) or e5m2 (largest 57,344) of the OCP 8-bit floating point specification (rev 1.0),
rounded to nearest even; infinities saturate, NaN stays NaN. With m the largest magnitude of what shares a
scale:

    per tensor   s = largest / m                     of the tensor itself (tensorwise) or of the one before
                                                     it in time (delayed: `DelayedScale`)
    blockwise    s = 2^floor(log2(largest / m))      128 x 128 of a weight, 1 x 128 of what it is multiplied
                                                     with (DeepSeek-V3, arXiv 2412.19437, section 3.3.2,
                                                     with scales that are powers of two)
    mxfp8        1 / s = 2^(floor(log2 m) - emax)    1 x 32 (OCP Microscaling formats 1.0, section 6.3), or
                 1 / s = 2^ceil(log2(m / largest))   with `round_up`, as Transformer Engine has it: no element
                                                     of the block saturates

m = 0 gives s = 1 (blocks of mxfp8: 2^127), m = inf gives s = 1 (mxfp8: 2^-127). NaN does not enter m.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK, MX_BLOCK = 128, 32
_LARGEST_EXPONENT = 127  # the same for a scale in e8m0 and for float32


@dataclass(frozen=True)
class Format:
    """A float8 format."""

    dtype: torch.dtype
    largest: float
    emax: int  # exponent of the largest number


E4M3 = Format(torch.float8_e4m3fn, 448.0, 8)
E5M2 = Format(torch.float8_e5m2, 57344.0, 15)


@dataclass(frozen=True)
class Quantized:
    """A matrix in float8."""

    values: torch.Tensor  # float8 [R, C]
    inverse_scales: torch.Tensor  # float32 [row blocks, column blocks]
    block: tuple[int, int]  # rows and columns of a block

    def dequantize(self) -> torch.Tensor:
        """Return the matrix as float32 [R, C]."""
        return self.values.float() * _spread(self.inverse_scales, self.block, self.values.shape)


def largest_magnitudes(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest |element| that is a number of each block, float32 [row blocks, column blocks];
    blocks at the edges may be smaller.

    Args:
        matrix: [R, C], not empty.
        block: rows and columns of a block.
    """
    magnitudes = matrix.detach().float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
    rows, columns = (-size % step for size, step in zip(matrix.shape, block, strict=True))
    padded = F.pad(magnitudes, (0, columns, 0, rows))
    return padded.view(-1, block[0], padded.shape[1] // block[1], block[1]).amax(dim=(1, 3))


def tensor_scale(largest_magnitude: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the scale of a tensor; see the head of this file."""
    # number / tensor would be a reciprocal and a product, rounded twice
    scale = torch.full_like(largest_magnitude, form.largest) / largest_magnitude
    good = (largest_magnitude > 0) & largest_magnitude.isfinite()
    return torch.where(good, scale.clamp(max=torch.finfo(torch.float32).max), torch.ones_like(scale))


def block_scale(largest_magnitude: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the scales of blocks, powers of two."""
    scale = tensor_scale(largest_magnitude, form)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def mx_exponents(largest_magnitude: torch.Tensor, form: Format, round_up: bool = False) -> torch.Tensor:
    """Return the exponents of the inverse scales of MX blocks, int32 in -127 to 127: what e8m0 stores."""
    finite = largest_magnitude.isfinite()
    magnitude = torch.where(finite, largest_magnitude, torch.ones_like(largest_magnitude))
    if round_up:
        mantissa, exponent = torch.frexp(magnitude / form.largest)  # mantissa in [0.5, 1)
        exponent = exponent - (mantissa == 0.5).int()
    else:
        exponent = torch.frexp(magnitude).exponent - 1 - form.emax
    exponent = torch.where(largest_magnitude == 0, -_LARGEST_EXPONENT, exponent)
    exponent = torch.where(finite, exponent, _LARGEST_EXPONENT)
    return exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).int()


def cast(scaled: torch.Tensor, form: Format) -> torch.Tensor:
    """Round to float8, to nearest even; what is too large saturates."""
    return scaled.clamp(-form.largest, form.largest).to(form.dtype)


def quantize(matrix: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], form: Format) -> Quantized:
    """Quantise a matrix with scales that are known.

    Args:
        matrix: [R, C].
        scale: float32 [row blocks, column blocks].
        block: rows and columns of a block; the whole shape for one scale.
    """
    values = cast(matrix.float() * _spread(scale, block, matrix.shape), form)
    return Quantized(values, 1.0 / scale, block)


def quantize_blocks(matrix: torch.Tensor, block: tuple[int, int], form: Format) -> Quantized:
    """Quantise a matrix blockwise, by its own magnitudes."""
    return quantize(matrix, block_scale(largest_magnitudes(matrix, block), form), block, form)


def quantize_tensor(matrix: torch.Tensor, form: Format) -> Quantized:
    """Quantise a matrix with one scale, by its own largest magnitude."""
    whole = (matrix.shape[0], matrix.shape[1])
    return quantize(matrix, tensor_scale(largest_magnitudes(matrix, whole), form), whole, form)


def quantize_mx(matrix: torch.Tensor, form: Format, round_up: bool = False) -> Quantized:
    """Quantise a matrix in MX blocks of 32 along its rows."""
    block = (1, MX_BLOCK)
    exponents = mx_exponents(largest_magnitudes(matrix, block), form, round_up)
    values = torch.ldexp(matrix.float(), -_spread(exponents, block, matrix.shape))
    return Quantized(
        cast(values, form), torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents), block
    )


class DelayedScale:
    """The scale of a tensor that changes from step to step, taken from its largest magnitude the time before:
    Transformer Engine's delayed scaling with a history of one, Megatron's default. The first time it is 1.
    """

    def __init__(self, form: Format):
        self.form, self._scale = form, torch.ones(1, 1)

    def quantize(self, matrix: torch.Tensor) -> Quantized:
        """Quantise with the scale of the time before, and note this one's magnitude."""
        whole = (matrix.shape[0], matrix.shape[1])
        quantized = quantize(matrix, self._scale, whole, self.form)
        seen = largest_magnitudes(matrix, whole)
        if bool((seen > 0) & seen.isfinite()):  # else the scale stays
            self._scale = tensor_scale(seen, self.form)
        return quantized


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Return the scale of every element, or something that broadcasts to it."""
    if scales.numel() == 1:
        return scales
    rows, columns = (scales.repeat_interleave(block[0], 0)[: shape[0]], block[1])
    return rows.repeat_interleave(columns, 1)[:, : shape[1]]
