"""Tiles of the logits hidden @ weight.T / temperature, and the pass over them that takes their statistics."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megagrpo.ops.fused_passes import LOWEST_LOGIT, is_fused
from megagrpo.ops.matmul import as_operand, multiply_transposed, statistics_dtype
from megagrpo.ops.row_statistics import LOG2E, RowStatistics
from megagrpo.ops.tiling import choose_tiling
from megagrpo.ops.vocab_shard import VocabShard


class LogitTiles:
    """Logits of this rank's vocabulary shard, a tile at a time.

    Args:
        hidden: [T, H].
        weight: [Vp, H].
        shard: which columns are real.
        temperature: scalar or [T]; the logits are divided by it here and nowhere else.
        bounds: bound the logits below when they are written, so that -inf (a masked token) makes no NaN;
            False leaves that to the fused passes.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        shard: VocabShard,
        temperature: float | Tensor,
        bounds: bool | None = None,
    ):
        self.hidden, self.weight, self.shard = hidden, weight, shard
        self.dtype = statistics_dtype(hidden.dtype)
        self.device = hidden.device
        self.bounds = not is_fused(hidden.device) if bounds is None else bounds
        self.tiling = choose_tiling(hidden.shape[0], hidden.device)
        if isinstance(temperature, Tensor):
            self.row_scale: Tensor | None = (1.0 / temperature.to(self.dtype)).unsqueeze(1)
            self.scale = LOG2E
        else:
            self.row_scale, self.scale = None, LOG2E / temperature

    @property
    def num_rows(self) -> int:
        """T."""
        return self.hidden.shape[0]

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """Local column ranges with their weight operand [C, H]. The outer loop: a widened weight tile
        serves all rows.
        """
        for columns in self.tiling.column_slices(self.shard.num_columns if self.num_rows else 0):
            yield columns, self.weight_operand(columns)

    def weight_operand(self, columns: slice) -> Tensor:
        """[C, H] ready to be multiplied."""
        return as_operand(self.weight[columns])

    def rows(self) -> Iterator[slice]:
        """Row ranges. The inner loop."""
        return self.tiling.row_slices(self.num_rows)

    def scratch(self) -> Tensor:
        """One flat buffer for a tile; `view` shapes it."""
        columns = min(self.tiling.columns, self.shard.num_columns)
        return torch.empty(self.tiling.rows * columns, dtype=self.dtype, device=self.device)

    def hidden_operand(self, rows: slice) -> Tensor:
        """[R, H] ready to be multiplied."""
        return as_operand(self.hidden[rows])

    def tile(self, scratch: Tensor | None, stash: "LogitStash | None", rows: slice, columns: slice) -> Tensor:
        """Where a tile of logits lies: in the stash where there is one, else at the head of the flat
        `scratch`.
        """
        return view(scratch, rows, columns) if stash is None else stash.tile(self.num_rows, rows, columns)

    def fill(self, out: Tensor, rows: slice, weight: Tensor) -> None:
        """Out [R, C] = the base-2 logits of `rows` for the weight operand [C, H]."""
        multiply_transposed(out, self.hidden_operand(rows), weight, self.scale)
        if self.row_scale is not None:
            out.mul_(self.row_scale[rows])
        if self.bounds:
            out.clamp_(min=LOWEST_LOGIT)


def view(buffer: Tensor, rows: slice, columns: slice) -> Tensor:
    """The head of a flat buffer as a contiguous [R, C] tile."""
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    return buffer[: shape[0] * shape[1]].view(shape)


class LogitStash:
    """Memory for all the base-2 logits of some rows; each tile is contiguous in it.

    Args:
        num_rows: most rows it will hold.
        num_columns: local columns.
        like: a tensor of the device.
        dtype: of the logits.
    """

    def __init__(self, num_rows: int, num_columns: int, like: Tensor, dtype: torch.dtype):
        self._buffer = torch.empty(num_rows * num_columns, dtype=dtype, device=like.device)

    def tile(self, num_rows: int, rows: slice, columns: slice) -> Tensor:
        """The [R, C] tile of `rows` of the num_rows that are in it."""
        width = columns.stop - columns.start
        start = num_rows * columns.start + rows.start * width
        return self._buffer[start : start + (rows.stop - rows.start) * width].view(-1, width)


def compute_row_statistics(
    tiles: LogitTiles, targets: Tensor, with_entropy: bool, stash: LogitStash | None = None
) -> RowStatistics:
    """Statistics of all rows over the whole vocabulary. Collective over the shard's group: one MAX and one
    SUM.

    Args:
        tiles: the logits.
        targets: [T] global ids.
        with_entropy: also keep the first moment.
        stash: receives all the logits, or None.
    """
    statistics = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_entropy)
    scratch = tiles.scratch()
    exponentials = torch.empty_like(scratch) if with_entropy and not is_fused(tiles.device) else scratch
    for columns, weight in tiles.columns():
        for rows in tiles.rows():
            x = tiles.tile(scratch, stash, rows, columns)
            tiles.fill(x, rows, weight)
            statistics.set_target(rows, x, *tiles.shard.locate(targets[rows], columns))
            statistics.update(rows, x, view(scratch, rows, columns), view(exponentials, rows, columns))
    statistics.all_reduce_(tiles.shard)
    return statistics
