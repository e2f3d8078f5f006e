"""Tiles of the logits hidden @ weight.T / temperature, and the gradient that flows back through them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megagrpo.ops.matmul import accumulate, as_operand, multiply_transposed, statistics_dtype
from megagrpo.ops.row_statistics import LN2, LOG2E, RowStatistics
from megagrpo.ops.tiling import choose_tiling
from megagrpo.ops.vocab_shard import VocabShard
from megagrpo.ops.weight_gradient import WeightGradient


class LogitTiles:
    """Logits of this rank's vocabulary shard, a tile at a time.

    Args:
        hidden: [T, H].
        weight: [Vp, H].
        shard: which columns are real.
        temperature: scalar or [T]; the logits are divided by it here and nowhere else.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float | Tensor):
        self.hidden, self.weight, self.shard = hidden, weight, shard
        self.dtype = statistics_dtype(hidden.dtype)
        self.device = hidden.device
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
        """Local column ranges with their weight operand [C, H]. The outer loop: a widened weight tile serves all rows."""
        for columns in self.tiling.column_slices(self.shard.num_columns if self.num_rows else 0):
            yield columns, as_operand(self.weight[columns])

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

    def fill(self, out: Tensor, rows: slice, weight: Tensor) -> None:
        """out [R, C] = the base-2 logits of `rows` for the weight operand [C, H]."""
        multiply_transposed(out, self.hidden_operand(rows), weight, self.scale)
        if self.row_scale is not None:
            out.mul_(self.row_scale[rows])


def view(buffer: Tensor, rows: slice, columns: slice) -> Tensor:
    """The head of a flat buffer as a contiguous [R, C] tile."""
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    return buffer[: shape[0] * shape[1]].view(shape)


def stashed(stash: Tensor, num_rows: int, rows: slice, columns: slice) -> Tensor:
    """The [R, C] tile of a flat stash of num_rows x columns logits; each tile is contiguous."""
    width = columns.stop - columns.start
    start = num_rows * columns.start + rows.start * width
    return stash[start : start + (rows.stop - rows.start) * width].view(-1, width)


def compute_row_statistics(tiles: LogitTiles, targets: Tensor, with_entropy: bool, stash: Tensor | None = None) -> RowStatistics:
    """Statistics of all rows over the whole vocabulary. Collective over the shard's group: one MAX and one SUM.

    Args:
        tiles: the logits.
        targets: [T] global ids.
        with_entropy: also keep the first moment.
        stash: flat buffer of at least T x columns elements that receives all the logits, or None.
    """
    statistics = RowStatistics(tiles.num_rows, tiles.dtype, tiles.device, with_entropy)
    scratch = tiles.scratch()
    exponentials = torch.empty_like(scratch) if with_entropy else scratch
    for columns, weight in tiles.columns():
        for rows in tiles.rows():
            centred = view(scratch, rows, columns)
            x = centred if stash is None else stashed(stash, tiles.num_rows, rows, columns)
            tiles.fill(x, rows, weight)
            statistics.set_target(rows, x, *tiles.shard.locate(targets[rows], columns))
            statistics.update(rows, x, centred, view(exponentials, rows, columns))
    statistics.all_reduce_(tiles.shard)
    return statistics


class LogitGradient:
    """dL/dlogits of a tile from dL/dlogprob and dL/dentropy.

    With u_j = log2 p_j, temperature t, a = -(grad_logprob + grad_entropy * entropy) / t and b = -grad_entropy * ln 2 / t,

        dL/dlogit_j = p_j (a + b u_j) + 1[j = target] grad_logprob / t

    which is grad_logprob (1[j = target] - p_j) - grad_entropy p_j (ln p_j + entropy), over t.

    Args:
        tiles: the logits.
        targets: [T] global ids.
        log2_normaliser: [T] over the whole vocabulary.
        grad_logprobs: [T] or None.
        entropy: [T] or None; needed with grad_entropy.
        grad_entropy: [T] or None.
    """

    def __init__(
        self,
        tiles: LogitTiles,
        targets: Tensor,
        log2_normaliser: Tensor,
        grad_logprobs: Tensor | None,
        entropy: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ):
        self.shard, self.targets, self.log2_normaliser = tiles.shard, targets, log2_normaliser.unsqueeze(1)
        # scale = log2(e) / temperature, so scale * ln 2 is the factor of the chain rule through the temperature.
        factor = tiles.scale * LN2 if tiles.row_scale is None else tiles.row_scale.squeeze(1) * (tiles.scale * LN2)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log2_normaliser)
        self.at_target = grad_logprobs.to(tiles.dtype) * factor
        self.constant = -self.at_target
        self.slope: Tensor | None = None
        if grad_entropy is not None:
            grad_entropy = grad_entropy.to(tiles.dtype) * factor
            self.constant = self.constant - grad_entropy * entropy
            self.slope = (grad_entropy * -LN2).unsqueeze(1)
        self.constant = self.constant.unsqueeze(1)

    @property
    def needs_scratch(self) -> bool:
        """Whether `compute_` needs a second tile."""
        return self.slope is not None

    def compute_(self, x: Tensor, scratch: Tensor, rows: slice, columns: slice) -> None:
        """Turns the base-2 logits x [R, C] into dL/dlogits in place; scratch [R, C] is used where `needs_scratch`."""
        x.sub_(self.log2_normaliser[rows])
        if self.slope is None:
            x.exp2_().mul_(self.constant[rows])
        else:
            torch.addcmul(self.constant[rows], self.slope[rows], x, out=scratch)
            x.exp2_().mul_(scratch)
        inside, position = self.shard.locate(self.targets[rows], columns)
        x.scatter_add_(1, position, (self.at_target[rows] * inside).unsqueeze(1))


def backpropagate(
    tiles: LogitTiles,
    gradient: LogitGradient,
    grad_hidden: Tensor | None,
    grad_weight: WeightGradient | None,
    stash: Tensor | None = None,
) -> None:
    """Adds every tile's part to the gradients.

    Args:
        tiles: the logits.
        gradient: their gradient.
        grad_hidden: [T, H] float32 or wider, receives this shard's part; or None.
        grad_weight: receives the weight's gradient; or None.
        stash: the logits that `compute_row_statistics` left there, consumed; None recomputes them.
    """
    scratch = tiles.scratch()
    spare = torch.empty_like(scratch) if gradient.needs_scratch else scratch
    for columns, weight in tiles.columns():
        for rows in tiles.rows():
            if stash is None:
                x = view(scratch, rows, columns)
                tiles.fill(x, rows, weight)
            else:
                x = stashed(stash, tiles.num_rows, rows, columns)
            gradient.compute_(x, view(spare, rows, columns), rows, columns)
            if grad_hidden is not None:
                accumulate(grad_hidden[rows], x, weight)
            if grad_weight is not None:
                grad_weight.add_(columns, x, tiles.hidden_operand(rows))
