"""The three-GEMM token loss against autograd through dense float64 logits, and where its gradients go.

Tolerances: float64 results differ by summation order alone, so 1e-11.
"""

import pytest
import torch

from megagrpo.errors import UserError
from megagrpo.ops import logit_tiles, tiling, token_loss
from megagrpo.ops.logprobs import linear_logprobs
from megagrpo.ops.token_loss import fits_one_chunk, linear_token_loss

VOCAB, PADDED, HIDDEN, ROWS = 23, 24, 5, 11
OLD_LOGPROBS = torch.linspace(-4.0, -2.0, ROWS, dtype=torch.float64)
ADVANTAGES = torch.linspace(-1.0, 1.0, ROWS, dtype=torch.float64)


@pytest.fixture(params=[1, 4, 100], ids=["chunks of 1 row", "chunks of 4 rows", "one chunk"], autouse=True)
def chunks(request, monkeypatch):
    monkeypatch.setattr(token_loss, "choose_stash_rows", lambda columns, element_bytes, device: request.param)
    monkeypatch.setattr(logit_tiles, "choose_tiling", lambda num_rows, device: tiling.Tiling(3, 5))
    return request.param


def clipped_loss(logprobs, entropy, rows):
    """PPO's clipped surrogate with an entropy bonus, already divided by the number of rows."""
    ratio = torch.exp(logprobs - OLD_LOGPROBS[rows])
    surrogate = torch.minimum(ratio * ADVANTAGES[rows], ratio.clamp(0.8, 1.2) * ADVANTAGES[rows])
    return (-surrogate - (0 if entropy is None else 0.01 * entropy)) / ROWS


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


def dense_loss(hidden, weight, targets, with_entropy, temperature=0.8):
    logprobs = torch.log_softmax(hidden @ weight[:VOCAB].t() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1) if with_entropy else None
    return clipped_loss(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, slice(0, ROWS)).sum()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_loss_and_gradients_equal_dense_autograd(with_entropy):
    hidden, weight, targets = inputs()
    expected = dense_loss(hidden, weight, targets, with_entropy)
    result = linear_token_loss(
        hidden, weight, targets, clipped_loss, vocab_size=VOCAB, temperature=0.8, compute_entropy=with_entropy
    )
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-12)
    # The factor 3 is what an upstream operation would bring.
    gradients = torch.autograd.grad(3 * result.loss, (hidden, weight))
    for ours, dense in zip(gradients, torch.autograd.grad(3 * expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-11, atol=1e-12)


def test_statistics_are_those_of_linear_logprobs_and_carry_no_gradient():
    hidden, weight, targets = inputs()
    temperature = torch.linspace(0.5, 2.0, ROWS)
    options = {"vocab_size": VOCAB, "temperature": temperature, "compute_entropy": True}
    result = linear_token_loss(hidden, weight, targets, clipped_loss, **options)
    expected = linear_logprobs(hidden, weight, targets, **options)
    torch.testing.assert_close(result.logprobs, expected.logprobs.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.entropy, expected.entropy.detach(), rtol=1e-12, atol=1e-12)
    assert not result.logprobs.requires_grad and not result.entropy.requires_grad


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_exact_kl_in_the_loss_equals_dense_autograd(with_entropy):
    """A GRPO-like loss with a KL term of the whole vocabulary, and a reference of another width."""
    hidden, weight, targets = inputs()
    generator = torch.Generator().manual_seed(4)
    reference = [torch.randn(rows, 3, dtype=torch.float64, generator=generator) for rows in (ROWS, PADDED)]
    coefficients = torch.linspace(0.1, 1.0, ROWS, dtype=torch.float64)

    def loss_fn(logprobs, entropy, rows, kl):
        return clipped_loss(logprobs, entropy, rows) + coefficients[rows] * kl

    actor, other = (
        torch.log_softmax(h @ w[:VOCAB].t() / 0.8, dim=-1) for h, w in ((hidden, weight), reference)
    )
    kl = (actor.exp() * (actor - other)).sum(dim=1)
    expected = dense_loss(hidden, weight, targets, with_entropy) + (coefficients * kl).sum()
    options = {
        "vocab_size": VOCAB,
        "temperature": 0.8,
        "compute_entropy": with_entropy,
        "reference": tuple(reference),
    }
    result = linear_token_loss(hidden, weight, targets, loss_fn, **options)
    torch.testing.assert_close(result.kl, kl.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(result.loss, expected, rtol=1e-11, atol=1e-12)
    assert (result.entropy is not None) == with_entropy
    for ours, dense in zip(
        *(torch.autograd.grad(2 * loss, (hidden, weight)) for loss in (result.loss, expected)), strict=True
    ):
        torch.testing.assert_close(ours, dense, rtol=1e-11, atol=1e-12)


def test_a_loss_that_couples_rows_is_right_exactly_where_one_chunk_holds_them(chunks):
    """GSPO's kind: the geometric mean of all ratios. In several chunks loss_fn would see only a part."""
    hidden, weight, targets = inputs()

    def coupled(logprobs, entropy, rows):
        return torch.exp((logprobs - OLD_LOGPROBS[rows]).mean()) * ADVANTAGES[rows]

    assert fits_one_chunk(hidden, weight) == (chunks >= ROWS)
    if fits_one_chunk(hidden, weight):
        logprobs = (
            torch.log_softmax(hidden @ weight[:VOCAB].t(), dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        )
        expected = coupled(logprobs, None, slice(0, ROWS)).sum()
        loss = linear_token_loss(hidden, weight, targets, coupled, vocab_size=VOCAB).loss
        for ours, dense in zip(
            *(torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected)), strict=True
        ):
            torch.testing.assert_close(ours, dense, rtol=1e-11, atol=1e-12)


def test_main_grad_is_added_to_and_the_hidden_gradient_carries_the_scale():
    hidden, weight, targets = inputs()
    weight.main_grad = torch.full_like(weight, 2.0)
    weight.grad_added_to_main_grad = False
    result = linear_token_loss(
        hidden, weight, targets, clipped_loss, vocab_size=VOCAB, temperature=0.8, loss_scale=0.25
    )
    (result.loss / 4).backward()
    expected = torch.autograd.grad(dense_loss(hidden, weight, targets, False) / 4, (hidden, weight))
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(weight.main_grad - 2.0, expected[1], rtol=1e-11, atol=1e-12)
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape


def test_a_low_precision_main_grad_gets_one_rounding_a_chunk():
    """Its tile products are formed in float32: the error is that of adding at most 11 bfloat16 numbers,
    2^-8 each.
    """
    hidden, weight, targets = inputs(torch.float32)
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    linear_token_loss(
        hidden, weight, targets, clipped_loss, vocab_size=VOCAB, temperature=0.8
    ).loss.backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    dense_loss(*exact, targets, False).backward()
    torch.testing.assert_close(weight.main_grad.double(), exact[1].grad, rtol=2e-2, atol=2e-3)
    assert weight.grad is None


def test_a_factor_that_main_grad_does_not_hold_is_refused():
    hidden, weight, targets = inputs()
    weight.main_grad = torch.zeros_like(weight)
    result = linear_token_loss(hidden, weight, targets, clipped_loss, vocab_size=VOCAB)
    with pytest.raises(
        RuntimeError,
        match=r"a factor of 0\.5, but main_grad already holds the gradient for "
        r"loss_scale = 1",
    ):
        (result.loss / 2).backward()


def test_scoring_without_grad_leaves_main_grad_alone():
    hidden, weight, targets = inputs()
    weight.main_grad = torch.zeros_like(weight)
    with torch.no_grad():
        linear_token_loss(hidden, weight, targets, clipped_loss, vocab_size=VOCAB)
    assert weight.main_grad.abs().max() == 0


def test_a_loss_that_ignores_the_log_probs_gives_zero_gradients():
    hidden, weight, targets = inputs()
    linear_token_loss(
        hidden, weight, targets, lambda logprobs, *_: torch.ones_like(logprobs), vocab_size=VOCAB
    ).loss.backward()
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_no_rows_give_a_zero_loss_with_zero_gradients():
    hidden, weight, targets = inputs()
    empty = hidden.detach()[:0].requires_grad_()
    result = linear_token_loss(
        empty, weight, targets[:0], clipped_loss, vocab_size=VOCAB, compute_entropy=True
    )
    result.loss.backward()
    assert (
        float(result.loss.detach()) == 0
        and result.logprobs.shape == result.entropy.shape == (0,)
        and weight.grad.abs().max() == 0
    )


def test_a_summed_loss_is_refused():
    hidden, weight, targets = inputs()
    with pytest.raises(UserError, match=r"loss_fn returned \[\]; allowed is one loss a row"):
        linear_token_loss(hidden, weight, targets, lambda logprobs, *_: logprobs.sum(), vocab_size=VOCAB)


def test_a_second_backward_is_refused():
    hidden, weight, targets = inputs()
    loss = linear_token_loss(hidden, weight, targets, clipped_loss, vocab_size=VOCAB).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


class LikeMegatron:
    """The backward hook of Megatron's DDP on one parameter (distributed_data_parallel.py,
    `_make_backward_post_hook`).
    """

    def __init__(self, weight, tied):
        self.weight, self.calls = weight, 0
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        if tied:
            weight.zero_out_wgrad = True
        self.accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
        self.accumulator.register_hook(self.hook)

    def hook(self, *_):
        self.calls += 1
        weight = self.weight
        if weight.grad is not None and (
            not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False)
        ):
            weight.main_grad.add_(weight.grad)
        weight.grad = None


@pytest.mark.parametrize("three_gemms", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatrons_hook_runs_and_every_gradient_is_counted_once(dtype, tied, three_gemms):
    """Tied: the embedding look-up's gradient and ours meet in one parameter. Two micro-batches: nothing is
    overwritten.

    Tolerance: the look-up's gradient is summed in the parameter's type by autograd itself, hence 1e-2 for
    bfloat16.
    """
    _, weight, targets = inputs(dtype)
    tokens = torch.arange(ROWS) % 7
    ddp = LikeMegatron(weight, tied)

    def hidden_of(weight):
        return (
            torch.nn.functional.embedding(tokens, weight)
            if tied
            else torch.linspace(-1, 1, ROWS * HIDDEN).view(ROWS, HIDDEN).to(dtype).to(weight)
        )

    for _ in range(2):
        if three_gemms:
            loss = linear_token_loss(
                hidden_of(weight), weight, targets, clipped_loss, vocab_size=VOCAB, temperature=0.8
            ).loss
        else:
            logprobs = linear_logprobs(
                hidden_of(weight), weight, targets, vocab_size=VOCAB, temperature=0.8
            ).logprobs
            loss = clipped_loss(logprobs, None, slice(0, ROWS)).sum()
        loss.backward()
    exact = weight.detach().double().requires_grad_()
    (2 * dense_loss(hidden_of(exact), exact, targets, False)).backward()
    assert ddp.calls == 2 and weight.grad is None
    tolerance = 1e-5 if dtype == torch.float32 or not tied else 1e-2
    torch.testing.assert_close(weight.main_grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
