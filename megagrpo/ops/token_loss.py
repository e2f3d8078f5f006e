"""Token-level losses with known denominators: three GEMMs, because the gradient is formed while the logits
are still there.

Where a token's loss needs nothing of the other rows, its gradient is known as soon as its log-prob is. So a
chunk of rows keeps its logits (a bounded stash), evaluates the loss, and turns the stash into gradients at
once; nothing is recomputed and the backward only hands the results on. Losses that couple rows, or whose
denominator comes later, take `linear_logprobs`, unless all rows fit one chunk.

On several ranks a row's gradient needs its normaliser over the whole vocabulary, so each chunk costs one MAX
and one SUM of a few rows'
length: one pair for a micro-batch that fits the stash.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.errors import UserError
from megagrpo.ops.logit_gradient import LogitGradient, backpropagate
from megagrpo.ops.logit_tiles import LogitStash, LogitTiles, compute_row_statistics
from megagrpo.ops.matmul import statistics_dtype
from megagrpo.ops.pair_statistics import compute_pair_statistics
from megagrpo.ops.tiling import choose_stash_rows, even_slices
from megagrpo.ops.vocab_shard import VocabShard, check_inputs, check_reference
from megagrpo.ops.weight_gradient import WeightGradient

# (logprobs [R], entropy [R] or None, rows of the input; with a reference also kl [R]) -> loss of each row,
# weighted, [R]
TokenLoss = Callable[..., Tensor]


@dataclass(frozen=True)
class LinearTokenLoss:
    """Result of `linear_token_loss`.

    Attributes:
        loss: scalar sum over rows, differentiable in hidden and weight.
        logprobs: [T] detached.
        entropy: [T] detached, None where it was not asked for.
        kl: [T] detached KL(actor || reference), None without a reference.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    kl: Tensor | None


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
    reference: tuple[Tensor, Tensor] | None = None,
    reduce_hidden_grad: bool = True,
    accumulate_main_grad: bool = True,
    loss_scale: float = 1.0,
) -> LinearTokenLoss:
    """Sum over rows of loss_fn(log-prob, entropy, rows), with the gradients of `linear_logprobs` at three
    quarters of its GEMMs.

    With a reference the loss also sees the exact KL: loss_fn(log-prob, entropy, rows, kl), at four GEMMs
    where `linear_exact_kl` has six.

    Collective over `group`: one MAX and one SUM for each chunk of rows that fits the stash (see the module's
    head), and one SUM of dL/dhidden, in the forward; none where T is 0.

    The weight's gradient goes to `weight.main_grad` in the FORWARD where the parameter has one. It must
    therefore be zeroed before the forward, the call must not be replayed by activation recompute, and the
    factor that the backward will bring must be known: it is `loss_scale` (for example 1 / micro-batches, or
    the dynamic scale of float16).

    Args:
        hidden: [T, H] float; only the rows that take part in the loss. The same on every rank of the group.
        weight: [Vp, H] of the same type; rank r of the group holds rows r * Vp .. (r + 1) * Vp of the padded
            vocabulary.
        targets: [T] int64 global token ids.
        loss_fn: called on consecutive row ranges that cover [T], with leaves that require grad; its rows must
            not depend on each other across calls, and must be the same on every rank of the group. Its
            entropy gradient is followed where it uses the entropy.
        vocab_size: the true V; padded columns beyond it never take part.
        temperature: scalar or [T]; the logits are divided by it once.
        group: tensor-parallel group, None for one rank.
        compute_entropy: pass the entropy to loss_fn and return it.
        reference: (hidden [T, H'], weight [Vp, H']) of the reference model, a constant, split alike; None
            leaves the KL out.
        reduce_hidden_grad: all-reduce dL/dhidden over the group; False where a sequence-parallel gather
            reduce-scatters it.
        accumulate_main_grad: add the weight's gradient in float32 to `weight.main_grad` where it has one.
        loss_scale: what the backward will multiply the returned loss by; only used with `main_grad`.

    Returns:
        The summed loss and the detached statistics of the rows.

    Raises:
        UserError: shapes, types, targets or temperature out of range.
        RuntimeError: in the backward, where the gradient is in `main_grad` already and the factor that came
            is not `loss_scale`.
    """
    check_inputs("linear_token_loss", hidden, weight, targets, vocab_size, temperature)
    if reference is not None:
        check_reference("linear_token_loss", *reference, hidden, weight)
        reference = tuple(tensor.detach() for tensor in reference)
    shard = VocabShard.of(weight, vocab_size, group)
    options = _Options(
        loss_fn, temperature, reference, compute_entropy, reduce_hidden_grad, accumulate_main_grad, loss_scale
    )
    return LinearTokenLoss(
        *_LinearTokenLoss.apply(hidden, weight, targets, shard, options, torch.is_grad_enabled())
    )


def fits_one_chunk(hidden: Tensor, weight: Tensor, with_reference: bool = False) -> bool:
    """Whether `linear_token_loss` would call loss_fn once, on all rows: then even a loss that couples rows
    may use it.

    The same on every rank of a tensor-parallel group.
    """
    return len(hidden) <= _max_rows(hidden, weight, with_reference)


def _max_rows(hidden: Tensor, weight: Tensor, with_reference: bool) -> int:
    models = 2 if with_reference else 1
    return choose_stash_rows(models * len(weight), statistics_dtype(hidden.dtype).itemsize, hidden.device)


class _Options(NamedTuple):
    loss_fn: TokenLoss
    temperature: float | Tensor
    reference: tuple[Tensor, Tensor] | None
    with_entropy: bool
    reduce_hidden_grad: bool
    to_main_grad: bool
    loss_scale: float


class _Chunks:
    """Scores the input and differentiates the loss, one chunk of rows after the other, in one stash (two
    with a reference).
    """

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, options: _Options):
        self.hidden, self.weight, self.targets, self.shard, self.options = (
            hidden,
            weight,
            targets,
            shard,
            options,
        )
        dtype = statistics_dtype(hidden.dtype)
        self.max_rows = _max_rows(hidden, weight, options.reference is not None)
        rows = min(self.max_rows, len(hidden))
        self.stash = LogitStash(rows, shard.num_columns, hidden, dtype)
        self.reference_stash = (
            None if options.reference is None else LogitStash(rows, shard.num_columns, hidden, dtype)
        )

    def slices(self) -> Iterator[slice]:
        """The chunks' rows."""
        return even_slices(len(self.hidden), self.max_rows)

    def score(self, rows: slice, scale: float) -> tuple[Tensor, list[Tensor | None], LogitGradient]:
        """Losses [R], [log-probs, entropy, KL] of [R] or None, and the gradient of scale * losses.
        Collective: one MAX, one SUM; with a reference one more SUM.
        """
        options, targets = self.options, self.targets[rows]
        temperature = (
            options.temperature[rows] if isinstance(options.temperature, Tensor) else options.temperature
        )
        bounds = None if options.reference is None else True
        tiles = LogitTiles(self.hidden[rows], self.weight, self.shard, temperature, bounds)
        pair = None
        if options.reference is None:
            statistics = compute_row_statistics(tiles, targets, options.with_entropy, self.stash)
        else:
            reference = LogitTiles(
                options.reference[0][rows], options.reference[1], self.shard, temperature, bounds
            )
            pair = compute_pair_statistics(tiles, reference, targets, self.stash, self.reference_stash)
            statistics = pair.actor
        scores = [
            statistics.logprobs(),
            statistics.entropy() if options.with_entropy else None,
            None if pair is None else pair.kl(),
        ]
        losses, grads = _differentiate(options.loss_fn, scores, rows, scale)
        gradient = LogitGradient(tiles, statistics.log2_normaliser())
        gradient.add_logprobs(grads[0], targets)
        gradient.add_entropy(grads[1], scores[1])
        if pair is not None:
            gradient.add_kl(grads[2], scores[2], reference, pair.reference.log2_normaliser())
        return losses, scores, gradient


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shard, options, with_grad):
        needs_hidden, needs_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        chunks = _Chunks(hidden, weight, targets, shard, options)
        dtype = statistics_dtype(hidden.dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needs_hidden else None
        grad_weight = WeightGradient(weight, options.to_main_grad) if needs_weight else None
        ctx.loss_scale = options.loss_scale if needs_weight and grad_weight.in_main_grad else None
        ctx.set_materialize_grads(False)

        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        kept = (True, options.with_entropy, options.reference is not None)
        results = [
            torch.empty(len(hidden), dtype=dtype, device=hidden.device) if keep else None for keep in kept
        ]
        for rows in chunks.slices():
            losses, scores, gradient = chunks.score(rows, 1.0 if ctx.loss_scale is None else ctx.loss_scale)
            loss += losses.sum()
            for result, score in zip(results, scores, strict=True):
                if result is not None:
                    result[rows] = score
            if needs_hidden or needs_weight:
                part = grad_hidden[rows] if needs_hidden else None
                backpropagate(gradient, part, grad_weight, chunks.stash, chunks.reference_stash)
        if needs_hidden and options.reduce_hidden_grad:
            shard.all_reduce_sum_(grad_hidden)
        ctx.gradients, ctx.hidden_dtype = (grad_hidden, grad_weight), hidden.dtype
        ctx.mark_non_differentiable(*(result for result in results if result is not None))
        return loss, *results

    @staticmethod
    def backward(ctx, grad_loss, *_unused):
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_token_loss: its gradients were handed on already; a second backward "
                "through it is not possible"
            )
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        if ctx.loss_scale is not None:
            _check_scale(grad_loss, ctx.loss_scale)
            grad_loss = None
        if grad_hidden is not None:
            grad_hidden = (grad_hidden if grad_loss is None else grad_hidden.mul_(grad_loss)).to(
                ctx.hidden_dtype
            )
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.autograd_result(grad_loss),
            *[None] * 4,
        )


def _differentiate(
    loss_fn: TokenLoss, scores: list[Tensor | None], rows: slice, scale: float
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Losses [R] of a chunk, detached, and scale * the gradient of their sum by log-prob, entropy and KL;
    None where it is 0.
    """
    with torch.enable_grad():
        logprobs, entropy, kl = (
            None if score is None else score.detach().requires_grad_() for score in scores
        )
        losses = loss_fn(logprobs, entropy, rows) if kl is None else loss_fn(logprobs, entropy, rows, kl)
        if losses.shape != logprobs.shape:
            raise UserError(
                f"linear_token_loss: loss_fn returned {list(losses.shape)}; allowed is one loss "
                f"a row, {list(logprobs.shape)}"
            )
        if not losses.requires_grad:
            return losses, (None, None, None)
        leaves = [leaf for leaf in (logprobs, entropy, kl) if leaf is not None]
        gradients = iter(torch.autograd.grad(losses.sum() * scale, leaves, allow_unused=True))
    return losses.detach(), tuple(
        None if leaf is None else next(gradients) for leaf in (logprobs, entropy, kl)
    )


def _check_scale(grad_loss: Tensor, loss_scale: float) -> None:
    # Float32 keeps seven digits of a factor that was computed in Python's float64.
    close = (grad_loss - loss_scale).abs() <= 1e-6 * abs(loss_scale)
    if grad_loss.device.type != "cpu":
        torch._assert_async(close)
    elif not close:
        raise RuntimeError(
            f"linear_token_loss: the backward brings a factor of {float(grad_loss):g}, but main_grad "
            "already holds the gradient for "
            f"loss_scale = {loss_scale:g}"
        )
