"""The gradient that flows back through tiles of logits, into hidden states and weight."""

import torch
from torch import Tensor

from megagrpo.ops.fused_passes import is_fused, tile_gradient_
from megagrpo.ops.logit_tiles import LogitStash, LogitTiles, view
from megagrpo.ops.matmul import accumulate
from megagrpo.ops.row_statistics import LN2
from megagrpo.ops.weight_gradient import WeightGradient


class LogitGradient:
    """dL/dlogits of a tile from dL/dlogprob, dL/dentropy and dL/dKL(actor || reference).

    Over the temperature t, with u_j = log2 p_j and v_j = log2 q_j of the reference,

        dlogprob / dlogit_j = (1[j = target] - p_j) / t
        dentropy / dlogit_j = -p_j (ln p_j + entropy) / t
        dKL      / dlogit_j =  p_j (ln p_j - ln q_j - KL) / t

    so every tile is p_j (constant + slope u_j + divergence_slope (v_j - u_j)), plus grad_logprob / t at the
    target. The difference is taken
    first: where the models agree the KL's gradient is exactly 0.

    Args:
        tiles: the actor's logits.
        log2_normaliser: [T] over the whole vocabulary.
    """

    def __init__(self, tiles: LogitTiles, log2_normaliser: Tensor):
        self.tiles, self.shard, self.dtype, self.log2_normaliser = (
            tiles,
            tiles.shard,
            tiles.dtype,
            log2_normaliser.unsqueeze(1),
        )
        # scale = log2(e) / temperature, so scale * ln 2 is what the chain rule through the temperature
        # brings.
        self._factor = tiles.scale * LN2 if tiles.row_scale is None else tiles.row_scale * (tiles.scale * LN2)
        self.constant = torch.zeros_like(self.log2_normaliser)
        self.slope: Tensor | None = None
        self.reference: LogitTiles | None = None
        self.targets: Tensor | None = None

    def add_logprobs(self, grad: Tensor | None, targets: Tensor) -> None:
        """Adds the part of dL/dlogprob `grad` [T] for the global ids `targets` [T]; None is 0."""
        if grad is not None:
            self.targets, self.at_target = targets, self._per_row(grad)
            self.constant = self.constant - self.at_target

    def add_entropy(self, grad: Tensor | None, entropy: Tensor | None) -> None:
        """Adds the part of dL/dentropy `grad` [T]; None is 0."""
        if grad is not None:
            grad = self._per_row(grad)
            self.constant = self.constant - grad * entropy.unsqueeze(1)
            self.slope = -LN2 * grad

    def add_kl(
        self, grad: Tensor | None, kl: Tensor, reference: LogitTiles, reference_log2_normaliser: Tensor
    ) -> None:
        """Adds the part of dL/dKL `grad` [T]; None is 0."""
        if grad is not None:
            grad = self._per_row(grad)
            self.constant = self.constant - grad * kl.unsqueeze(1)
            self.reference, self.divergence_slope = reference, -LN2 * grad
            self.reference_log2_normaliser = reference_log2_normaliser.unsqueeze(1)

    @property
    def is_fused(self) -> bool:
        """Whether `compute_` takes the fused pass, which needs no scratch."""
        return self.reference is None and is_fused(self.tiles.device)

    def _per_row(self, grad: Tensor) -> Tensor:
        return grad.to(self.dtype).unsqueeze(1) * self._factor

    def compute_(
        self, x: Tensor, scratch: Tensor | None, reference: Tensor | None, rows: slice, columns: slice
    ) -> None:
        """Turns the actor's base-2 logits x [R, C] into dL/dlogits in place.

        Args:
            x: [R, C].
            scratch: [R, C], needed with a slope where the pass is not fused.
            reference: [R, C] base-2 logits of the reference, needed with `self.reference`; lost.
            rows: which rows.
            columns: which local columns.
        """
        if self.is_fused:
            tile_gradient_(
                x,
                self.log2_normaliser[rows],
                self.constant[rows],
                None if self.slope is None else self.slope[rows],
            )
        else:
            x.sub_(self.log2_normaliser[rows])
            factor = self.constant[rows]
            if self.slope is not None:
                factor = torch.addcmul(factor, self.slope[rows], x, out=scratch)
            if reference is not None:
                reference.sub_(self.reference_log2_normaliser[rows]).sub_(x)
                factor = torch.addcmul(factor, self.divergence_slope[rows], reference, out=reference)
            x.exp2_().mul_(factor)
        if self.targets is not None:
            inside, position = self.shard.locate(self.targets[rows], columns)
            x.scatter_add_(1, position, self.at_target[rows] * inside.unsqueeze(1))


def backpropagate(
    gradient: LogitGradient,
    grad_hidden: Tensor | None,
    grad_weight: WeightGradient | None,
    stash: LogitStash | None = None,
    reference_stash: LogitStash | None = None,
) -> None:
    """Adds every tile's part to the gradients.

    Args:
        gradient: of the logits.
        grad_hidden: [T, H] float32 or wider, receives this shard's part; or None.
        grad_weight: receives the weight's gradient; or None.
        stash: the logits that the pass over them left there, consumed; None recomputes them.
        reference_stash: the same for the reference's.
    """
    tiles = gradient.tiles
    logits = tiles.scratch() if stash is None else None
    needs_scratch = gradient.slope is not None and not gradient.is_fused
    scratch = tiles.scratch() if needs_scratch else None
    recomputes_reference = gradient.reference is not None and reference_stash is None
    reference_logits = tiles.scratch() if recomputes_reference else None
    for columns, weight in tiles.columns():
        reference_weight = gradient.reference.weight_operand(columns) if recomputes_reference else None
        for rows in tiles.rows():
            x = tiles.tile(logits, stash, rows, columns)
            if stash is None:
                tiles.fill(x, rows, weight)
            y = None
            if gradient.reference is not None:
                y = tiles.tile(reference_logits, reference_stash, rows, columns)
                if reference_stash is None:
                    gradient.reference.fill(y, rows, reference_weight)
            gradient.compute_(x, None if scratch is None else view(scratch, rows, columns), y, rows, columns)
            operand = x.to(weight.dtype)  # both products take it
            if grad_hidden is not None:
                accumulate(grad_hidden[rows], operand, weight)
            if grad_weight is not None:
                grad_weight.add_(columns, operand, tiles.hidden_operand(rows))


def recompute_gradients(
    gradient: LogitGradient,
    needs_input_grad: tuple[bool, ...],
    reduce_hidden_grad: bool,
    accumulate_main_grad: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the two inputs (hidden, weight) with recomputed logits, as an autograd function returns
    them.

    Collective over the shard's group where `reduce_hidden_grad`: one SUM of dL/dhidden.

    Args:
        gradient: of the logits.
        needs_input_grad: whether hidden and weight need one.
        reduce_hidden_grad: all-reduce dL/dhidden.
        accumulate_main_grad: see `WeightGradient`.
    """
    tiles = gradient.tiles
    hidden, weight = tiles.hidden, tiles.weight
    grad_hidden = (
        torch.zeros(hidden.shape, dtype=tiles.dtype, device=tiles.device) if needs_input_grad[0] else None
    )
    grad_weight = WeightGradient(weight, accumulate_main_grad) if needs_input_grad[1] else None
    backpropagate(gradient, grad_hidden, grad_weight)
    if grad_hidden is not None:
        if reduce_hidden_grad:
            tiles.shard.all_reduce_sum_(grad_hidden)
        grad_hidden = grad_hidden.to(hidden.dtype)
    return grad_hidden, None if grad_weight is None else grad_weight.autograd_result()
