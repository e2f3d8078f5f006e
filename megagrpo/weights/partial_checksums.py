"""CRC-32 of a tensor from parts that no rank holds together. Pure.

CRC-32 is affine over GF(2): for byte strings of one length crc(a ^ b) = crc(a) ^ crc(b) ^ crc(zeros). So a
part has a share, which its holder makes alone: the linear part of the checksum of a tensor that is zero
outside of it. The shares of parts that do not overlap, and the checksum of as many zeros, combine by XOR to
the checksum of the whole, wherever the parts lie.

    share = Z(bytes behind) * (run_0 Z(stride)^(R-1) ^ ... ^ run_(R-1)),  Z(n): what n zero bytes do to the
    register, a 32 x 32 bit matrix

(the idea of zlib's crc32_combine, for strided runs). A run costs one call of zlib, and joining R runs log2(R)
steps over arrays.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache
from math import prod

import numpy as np
import torch

from megagrpo.weights.plan.boxes import Box, sizes

_ALL_ONES = 0xFFFFFFFF  # zlib begins with it and inverts the result; what is linear does neither
_TABLES = 4  # bytes of the register


def compute_share(part: torch.Tensor, place: Box, shape: tuple[int, ...]) -> int:
    """Return the share of `part`, which lies at `place` of a tensor of `shape`, in that tensor's CRC-32.

    Args:
        part: of the shape of `place`, on any device.
    """
    lengths, strides = sizes(place), _byte_strides(shape, part.itemsize)
    if not prod(lengths):
        return 0
    run_dim = next((dim for dim in range(len(shape) - 1, 0, -1) if lengths[dim] != shape[dim]), 0)
    rows = (
        part.detach()
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .reshape(prod(lengths[:run_dim]), -1)
    )
    runs = np.array([zlib.crc32(row, _ALL_ONES) ^ _ALL_ONES for row in rows], dtype=np.uint32).reshape(
        lengths[:run_dim]
    )
    for dim in range(run_dim - 1, -1, -1):
        runs = _join(runs, strides[dim])
    end = (
        sum((stop - 1) * stride for (_, stop), stride in zip(place[:run_dim], strides, strict=False))
        + place[run_dim][1] * strides[run_dim]
    )
    return int(_advance(runs, prod(shape) * part.itemsize - end))


def combine_shares(shares: Iterable[int], nbytes: int) -> str:
    """Return the checksum, as `checksum_of` writes it, of a tensor of `nbytes` bytes from the shares of
    its parts that are not zeros.
    """
    checksum = int(_advance(np.uint32(_ALL_ONES), nbytes)) ^ _ALL_ONES
    for share in shares:
        checksum ^= share
    return f"{checksum:08x}"


def _byte_strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    return [prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]


def _join(runs: np.ndarray, stride: int) -> np.ndarray:
    """Join registers along the last axis; the end of each run lies `stride` bytes behind that of the one
    before.
    """
    while runs.shape[-1] > 1:
        if runs.shape[-1] % 2:  # a register of zero before the first changes nothing
            runs = np.concatenate([np.zeros_like(runs[..., :1]), runs], axis=-1)
        runs = _advance(runs[..., 0::2], stride) ^ runs[..., 1::2]
        stride *= 2
    return runs[..., 0]


def _advance(registers: np.ndarray | np.uint32, zero_bytes: int) -> np.ndarray:
    """Return the registers after so many zero bytes."""
    registers, tables = np.asarray(registers), _tables(zero_bytes)
    result = np.zeros_like(registers)
    for place in range(_TABLES):
        result ^= tables[place][(registers >> np.uint32(8 * place)) & np.uint32(0xFF)]
    return result


@lru_cache(maxsize=4096)  # 4 KB each: strides and ends come again with every layer
def _tables(zero_bytes: int) -> np.ndarray:
    """Return what `zero_bytes` zero bytes make of every value of each byte of the register: uint32 [4,
    256].
    """
    columns = _columns(zero_bytes)
    tables = np.zeros((_TABLES, 256), dtype=np.uint32)
    values = np.arange(256)
    for bit in range(8):
        tables ^= np.where(values >> bit & 1, columns[bit::8][:, None], np.uint32(0))
    return tables


def _columns(zero_bytes: int) -> np.ndarray:
    """Return the matrix of `zero_bytes` zero bytes: what becomes of each bit of the register, uint32 [32]."""
    result = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for bit in range(zero_bytes.bit_length()):
        if zero_bytes >> bit & 1:
            result = _multiply(_doubled_columns(bit), result)
    return result


@lru_cache(maxsize=64)
def _doubled_columns(doublings: int) -> np.ndarray:
    """Return the matrix of 2 ** doublings zero bytes."""
    if doublings:
        half = _doubled_columns(doublings - 1)
        return _multiply(half, half)
    return np.array(
        [zlib.crc32(b"\0", (1 << bit) ^ _ALL_ONES) ^ _ALL_ONES for bit in range(32)], dtype=np.uint32
    )


def _multiply(columns: np.ndarray, registers: np.ndarray) -> np.ndarray:
    """Return a matrix times each register."""
    result = np.zeros_like(registers)
    for bit in range(32):
        result ^= np.where(registers >> np.uint32(bit) & np.uint32(1), columns[bit], np.uint32(0))
    return result
