"""FP8 casts of delayed, current and blockwise scaling, with the layouts that are stored."""

import torch

from te.enums import DTYPES
from te.registry import kernel


def _blocks(x, dtype, rows, columns, pow2):
    """Return (uint8 data, 1 / scale of each block) of x [M, K]; edge blocks are smaller."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = torch.finfo(dtype).max / tiles.abs().amax((1, 3)).clamp_min(1e-30)
    scale = torch.exp2(scale.log2().floor()) if pow2 else scale
    data = (tiles * scale[:, None, :, None]).to(dtype).view(torch.uint8).reshape(padded.shape)
    return data[: x.shape[0], : x.shape[1]], 1 / scale


def _quantize_blockwise(tensor, quantizer, out):
    x, dtype, pow2 = (
        tensor.float().reshape(-1, tensor.shape[-1]),
        DTYPES[quantizer.dtype.name],
        quantizer.force_pow_2_scales,
    )
    two, compact = quantizer.block_scaling_dim == 2, out._data_format.name == "COMPACT"
    for data, scale_inv, columnwise in (
        (out._rowwise_data, out._rowwise_scale_inv, False),
        (out._columnwise_data, out._columnwise_scale_inv, True),
    ):
        if data is None:
            continue
        if two:
            values, scales = _blocks(x.t() if columnwise else x, dtype, 128, 128, pow2)
        elif columnwise and compact:
            values, scales = _blocks(x, dtype, 128, 1, pow2)
        else:
            values, scales = _blocks(x.t() if columnwise else x, dtype, 1, 128, pow2)
            scales = scales if compact else scales.t()
        data.copy_(values.reshape(data.shape))
        scale_inv.zero_()
        scale_inv[: scales.shape[0], : scales.shape[1]] = scales


@kernel
def quantize(tensor, quantizer, output=None, noop=None):
    """Delayed, current and blockwise scaling; MXFP8 and NVFP4 raise here, after their checks."""
    dtype, kind = DTYPES[quantizer.dtype.name], type(quantizer).__name__
    if kind not in ("Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer"):
        raise NotImplementedError(f"transformer_engine_torch.quantize for {kind} is not rehearsed")
    out = (
        quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if output is None
        else output
    )
    if kind == "Float8BlockQuantizer":
        _quantize_blockwise(tensor, quantizer, out)
        return out
    amax, limit = tensor.abs().max().float() if tensor.numel() else torch.zeros(()), torch.finfo(dtype).max
    if kind == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        quantizer.scale.copy_(limit / amax.clamp_min(1e-30))
    data = (tensor.float() * quantizer.scale).clamp(-limit, limit).to(dtype).view(torch.uint8)
    if out._data is not None:
        out._data.copy_(data.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(data.reshape(-1, data.shape[-1]).t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(1 / quantizer.scale)
    return out


@kernel
def bgrad_quantize(input, quantizer):
    return [input.float().reshape(-1, input.shape[-1]).sum(0).to(input.dtype), quantize(input, quantizer)]


@kernel
def split_quantize(tensor, split_sections, quantizer_list):
    return [
        quantize(part, quantizer)
        for part, quantizer in zip(tensor.split(split_sections), quantizer_list, strict=True)
    ]


@kernel
def dequantize(input, otype):
    if input._data is not None:
        data = input._data
    else:
        data = input._transpose.reshape(input._transpose.shape[0], -1).t()
    return (data.contiguous().view(DTYPES[input._fp8_dtype.name]).float() * input._scale_inv).to(
        DTYPES[otype.name]
    )


@kernel
def fp8_transpose(input, dtype, *, out=None):
    flat = input.reshape(-1, input.shape[-1]).t().contiguous()
    return flat if out is None else out.copy_(flat.view(out.shape))


@kernel
def fused_amax_and_scale_update_after_reduction(reduced, histories, scales, algorithm, dtype, margin):
    limit, start = torch.finfo(DTYPES[dtype.name]).max, 0
    for history, scale in zip(histories, scales, strict=True):
        amax = reduced[start : start + history.shape[1]]
        start += history.shape[1]
        history[0].copy_(amax)
        peak = history.max(0).values if algorithm == "max" else history[0].clone()
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
        scale.copy_(torch.where(peak > 0, limit / peak / 2**margin, scale))
