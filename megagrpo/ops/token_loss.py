"""Token-level losses with known denominators: three GEMMs, because the gradient is formed while the logits are still there.

Where a token's loss needs nothing of the other rows, its gradient is known as soon as its log-prob is. So a chunk of rows keeps its
logits (a bounded stash), evaluates the loss, and turns the stash into gradients at once; nothing is recomputed and the backward only
hands the results on. Sequence-level losses (and losses whose denominator comes later) take `linear_logprobs`.

On several ranks a row's gradient needs its normaliser over the whole vocabulary, so each chunk costs one MAX and one SUM of a few rows'
length: one pair for a micro-batch that fits the stash.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.errors import UserError
from megagrpo.ops.logit_gradient import LogitGradient, backpropagate
from megagrpo.ops.logit_tiles import LogitTiles, compute_row_statistics
from megagrpo.ops.matmul import statistics_dtype
from megagrpo.ops.tiling import choose_stash_rows, even_slices
from megagrpo.ops.vocab_shard import VocabShard, check_inputs
from megagrpo.ops.weight_gradient import WeightGradient

# (logprobs [R], entropy [R] or None, rows of the input) -> loss of each row, weighted, [R]
TokenLoss = Callable[[Tensor, Tensor | None, slice], Tensor]


@dataclass(frozen=True)
class LinearTokenLoss:
    """Result of `linear_token_loss`.

    Attributes:
        loss: scalar sum over rows, differentiable in hidden and weight.
        logprobs: [T] detached.
        entropy: [T] detached, None where it was not asked for.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: TokenLoss,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    compute_entropy: bool = False,
    reduce_hidden_grad: bool = True,
    accumulate_main_grad: bool = True,
    loss_scale: float = 1.0,
) -> LinearTokenLoss:
    """Sum over rows of loss_fn(log-prob, entropy), with the gradients of `linear_logprobs` at three quarters of its GEMMs.

    Collective over `group`: one MAX and one SUM for each chunk of rows that fits the stash (see the module's head), and one SUM of
    dL/dhidden, in the forward; none where T is 0.

    The weight's gradient goes to `weight.main_grad` in the FORWARD where the parameter has one. It must therefore be zeroed before the
    forward, the call must not be replayed by activation recompute, and the factor that the backward will bring must be known: it is
    `loss_scale` (for example 1 / micro-batches, or the dynamic scale of float16).

    Args:
        hidden: [T, H] float; only the rows that take part in the loss. The same on every rank of the group.
        weight: [Vp, H] of the same type; rank r of the group holds rows r * Vp .. (r + 1) * Vp of the padded vocabulary.
        targets: [T] int64 global token ids.
        loss_fn: called on consecutive row ranges that cover [T], with leaves that require grad; its rows must not depend on each other
            across calls, and must be the same on every rank of the group. Its entropy gradient is followed where it uses the entropy.
        vocab_size: the true V; padded columns beyond it never take part.
        temperature: scalar or [T]; the logits are divided by it once.
        group: tensor-parallel group, None for one rank.
        compute_entropy: pass the entropy to loss_fn and return it.
        reduce_hidden_grad: all-reduce dL/dhidden over the group; False where a sequence-parallel gather reduce-scatters it.
        accumulate_main_grad: add the weight's gradient in float32 to `weight.main_grad` where it has one.
        loss_scale: what the backward will multiply the returned loss by; only used with `main_grad`.

    Returns:
        The summed loss and the detached statistics of the rows.

    Raises:
        UserError: shapes, types, targets or temperature out of range.
        RuntimeError: in the backward, where the gradient is in `main_grad` already and the factor that came is not `loss_scale`.
    """
    check_inputs("linear_token_loss", hidden, weight, targets, vocab_size, temperature)
    shard = VocabShard.of(weight, vocab_size, group)
    options = _Options(compute_entropy, reduce_hidden_grad, accumulate_main_grad, loss_scale, torch.is_grad_enabled())
    return LinearTokenLoss(*_LinearTokenLoss.apply(hidden, weight, targets, loss_fn, temperature, shard, options))


class _Options(NamedTuple):
    with_entropy: bool
    reduce_hidden_grad: bool
    to_main_grad: bool
    loss_scale: float
    with_grad: bool


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, loss_fn, temperature, shard, options):
        needs_hidden, needs_weight = (options.with_grad and needed for needed in ctx.needs_input_grad[:2])
        dtype = statistics_dtype(hidden.dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needs_hidden else None
        grad_weight = WeightGradient(weight, options.to_main_grad) if needs_weight else None
        ctx.loss_scale = options.loss_scale if needs_weight and grad_weight.in_main_grad else None
        ctx.set_materialize_grads(False)

        stash_rows = choose_stash_rows(weight.shape[0], dtype.itemsize, hidden.device)
        stash = torch.empty(min(stash_rows, hidden.shape[0]) * shard.num_columns, dtype=dtype, device=hidden.device)
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        parts = []
        for rows in even_slices(hidden.shape[0], stash_rows):
            tiles = LogitTiles(hidden[rows], weight, shard, temperature[rows] if isinstance(temperature, Tensor) else temperature)
            statistics = compute_row_statistics(tiles, targets[rows], options.with_entropy, stash)
            logprobs, entropy = statistics.logprobs(), statistics.entropy()
            row_losses, grad_logprobs, grad_entropy = _differentiate(loss_fn, logprobs, entropy, rows, ctx.loss_scale or 1.0)
            loss += row_losses.sum()
            parts.append((logprobs, entropy))
            if needs_hidden or needs_weight:
                gradient = LogitGradient(tiles, statistics.log2_normaliser())
                gradient.add_logprobs(grad_logprobs, targets[rows])
                gradient.add_entropy(grad_entropy, entropy)
                backpropagate(gradient, grad_hidden[rows] if needs_hidden else None, grad_weight, stash)
        if needs_hidden and options.reduce_hidden_grad:
            shard.all_reduce_sum_(grad_hidden)
        ctx.gradients, ctx.hidden_dtype = (grad_hidden, grad_weight), hidden.dtype
        logprobs = torch.cat([part[0] for part in parts]) if parts else loss.new_empty(0)
        entropy = torch.cat([part[1] for part in parts]) if parts and options.with_entropy else None
        if entropy is None and options.with_entropy:
            entropy = loss.new_empty(0)
        ctx.mark_non_differentiable(*(statistic for statistic in (logprobs, entropy) if statistic is not None))
        return loss, logprobs, entropy

    @staticmethod
    def backward(ctx, grad_loss, *_unused):
        if ctx.gradients is None:
            raise RuntimeError("linear_token_loss: its gradients were handed on already; a second backward through it is not possible")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        if ctx.loss_scale is not None:
            _check_scale(grad_loss, ctx.loss_scale)
            grad_loss = None
        if grad_hidden is not None:
            grad_hidden = (grad_hidden if grad_loss is None else grad_hidden.mul_(grad_loss)).to(ctx.hidden_dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.autograd_result(grad_loss), *[None] * 5


def _differentiate(loss_fn: TokenLoss, logprobs: Tensor, entropy: Tensor | None, rows: slice, scale: float):
    """Evaluates the loss of a chunk: (losses [R] detached, scale * dL/dlogprobs [R] or None, scale * dL/dentropy [R] or None)."""
    with torch.enable_grad():
        leaves = [statistic.detach().requires_grad_() for statistic in (logprobs, entropy) if statistic is not None]
        losses = loss_fn(leaves[0], leaves[1] if len(leaves) > 1 else None, rows)
        if losses.shape != logprobs.shape:
            raise UserError(f"linear_token_loss: loss_fn returned {list(losses.shape)}; allowed is one loss a row, {list(logprobs.shape)}")
        gradients = torch.autograd.grad(losses.sum() * scale, leaves, allow_unused=True) if losses.requires_grad else []
    return losses.detach(), *[*gradients, None, None][:2]


def _check_scale(grad_loss: Tensor, loss_scale: float) -> None:
    # Float32 keeps seven digits of a factor that was computed in Python's float64.
    close = (grad_loss - loss_scale).abs() <= 1e-6 * abs(loss_scale)
    if grad_loss.device.type != "cpu":
        torch._assert_async(close)
    elif not close:
        raise RuntimeError(
            f"linear_token_loss: the backward brings a factor of {float(grad_loss):g}, but main_grad already holds the gradient for "
            f"loss_scale = {loss_scale:g}"
        )
