"""How large a tile of logits is, per device: the one place where that is chosen."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Most of the time is spent in GEMMs of one tile, and between them four to six elementwise passes over it.
# Tiles of 512 x 1,024 float32 (2 MiB) keep both the passes and the operands in the second- and third-level
# caches of a CPU core while the GEMM runs at full speed.
_CPU_TILE_ROWS = 512
_CPU_TILE_ELEMENTS = 512 * 1024
_CPU_TILE_COLUMNS = 1024
# An accelerator wants enough blocks to fill every multiprocessor; 4,096 x 8,192 float32 is 128 MiB.
_CUDA_TILE_ROWS = 4096
_CUDA_TILE_ELEMENTS = 4096 * 8192
_CUDA_TILE_COLUMNS = 8192
# Logits of whole rows that the three-GEMM loss keeps between its forward and its gradient.
_CPU_STASH_BYTES = 320 << 20
_CUDA_STASH_BYTES = 2 << 30
# On widths that are no whole number of vectors a tile takes a third longer (measured with AVX-512: 1,019
# columns against 1,024).
_ALIGNMENT = 64
# Short inputs get wider tiles, so that few launches are needed, but never so wide that a weight tile dwarfs
# the logits.
_WIDEST = 8


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of one tile of logits.

    Attributes:
        rows: tokens of a tile.
        columns: vocabulary entries of a tile.
    """

    rows: int
    columns: int

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """Contiguous row ranges that cover `num_rows`."""
        return even_slices(num_rows, self.rows)

    def column_slices(self, num_columns: int) -> Iterator[slice]:
        """Contiguous column ranges that cover `num_columns`."""
        return even_slices(num_columns, self.columns)


def even_slices(length: int, most: int) -> Iterator[slice]:
    """Splits `range(length)` into the fewest slices of at most `most`, all of one aligned size but the
    last.
    """
    if length == 0:
        return
    size = -(-length // -(-length // most))
    size = min(most, -(-size // _ALIGNMENT) * _ALIGNMENT)
    for start in range(0, length, size):
        yield slice(start, min(length, start + size))


def choose_tiling(num_rows: int, device: torch.device) -> Tiling:
    """The tile shape for `num_rows` tokens on `device`."""
    if device.type == "cpu":
        rows, elements, columns = _CPU_TILE_ROWS, _CPU_TILE_ELEMENTS, _CPU_TILE_COLUMNS
    else:
        rows, elements, columns = _CUDA_TILE_ROWS, _CUDA_TILE_ELEMENTS, _CUDA_TILE_COLUMNS
    rows = max(1, min(rows, num_rows))
    return Tiling(rows, min(max(columns, elements // rows), columns * _WIDEST) // _ALIGNMENT * _ALIGNMENT)


def choose_stash_rows(padded_columns: int, element_bytes: int, device: torch.device) -> int:
    """How many rows of logits fit the memory kept between the forward and the gradient of the three-GEMM
    loss.

    Args:
        padded_columns: Vp, not a rank's share of the true vocabulary: all ranks of a tensor-parallel group
            must cut alike.
        element_bytes: of one logit.
        device: where they live.
    """
    budget, tile_rows = (
        (_CPU_STASH_BYTES, _CPU_TILE_ROWS) if device.type == "cpu" else (_CUDA_STASH_BYTES, _CUDA_TILE_ROWS)
    )
    rows = max(1, budget // (padded_columns * element_bytes))
    return rows if rows < tile_rows else rows // tile_rows * tile_rows
