"""The exact full-vocabulary KL against dense float64 `torch.distributions`-style arithmetic, on one rank.

Tolerances: float64 results differ by summation order alone, so 1e-11; float32 ones by the error of a float32
dot product, so 1e-5.
"""

import pytest
import torch

from megagrpo.errors import UserError
from megagrpo.ops import logit_tiles, tiling
from megagrpo.ops.exact_kl import linear_exact_kl

VOCAB, PADDED, HIDDEN, REFERENCE_HIDDEN, ROWS = 37, 40, 6, 4, 7


@pytest.fixture(params=[(3, 5), (512, 1024)], ids=["tiles of 3 x 5", "one tile"], autouse=True)
def tile_shape(request, monkeypatch):
    monkeypatch.setattr(logit_tiles, "choose_tiling", lambda num_rows, device: tiling.Tiling(*request.param))


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = [(ROWS, HIDDEN), (PADDED, HIDDEN), (ROWS, REFERENCE_HIDDEN), (PADDED, REFERENCE_HIDDEN)]
    hidden, weight, *reference = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        *reference,
        torch.randint(VOCAB, (ROWS,), generator=generator),
    )


def dense(hidden, weight, reference_hidden, reference_weight, targets, temperature):
    """The definitions, term by term: KL, entropy, log-prob and the reference's log-prob."""
    temperature = torch.as_tensor(temperature, dtype=hidden.dtype).reshape(-1, 1)
    actor = torch.log_softmax(hidden @ weight[:VOCAB].t() / temperature, dim=-1)
    reference = torch.log_softmax(reference_hidden @ reference_weight[:VOCAB].t() / temperature, dim=-1)
    kl = torch.nn.functional.kl_div(reference, actor, log_target=True, reduction="none").sum(dim=1)
    at_target = targets.unsqueeze(1)
    return (
        kl,
        -(actor.exp() * actor).sum(dim=1),
        actor.gather(1, at_target).squeeze(1),
        reference.gather(1, at_target).squeeze(1),
    )


def fused(*tensors, temperature=1.0):
    result = linear_exact_kl(*tensors, vocab_size=VOCAB, temperature=temperature)
    return result.kl, result.entropy, result.logprobs, result.reference_logprobs


@pytest.mark.parametrize(
    "temperature", [1.0, 0.7, torch.linspace(0.5, 2.0, ROWS)], ids=["1", "0.7", "per row"]
)
def test_values_and_gradients_equal_the_dense_definition(temperature):
    tensors = inputs()
    ours, expected = fused(*tensors, temperature=temperature), dense(*tensors, temperature)
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)
    coefficients = torch.linspace(-1, 1, 3 * ROWS, dtype=torch.float64).view(3, ROWS)
    losses = [(coefficients * torch.stack(values[:3])).sum() for values in (ours, expected)]
    for left, right in zip(*(torch.autograd.grad(loss, tensors[:2]) for loss in losses), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_gradients_of_the_divergence_pass_gradcheck():
    hidden, weight, *rest = inputs()
    assert torch.autograd.gradcheck(lambda h, w: fused(h, w, *rest, temperature=0.7)[0], (hidden, weight))


def test_the_divergence_of_a_model_from_itself_is_zero_with_zero_gradients():
    hidden, weight, *_ = inputs(torch.float32)
    result = linear_exact_kl(hidden, weight, hidden.detach(), weight.detach(), vocab_size=VOCAB)
    result.kl.sum().backward()
    assert result.logprobs is None and result.reference_logprobs is None
    assert result.kl.abs().max() == 0 and hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


@pytest.mark.parametrize(("distance", "largest"), [(4e-4, 1e-6), (1e-2, 1e-3)])
def test_a_small_divergence_keeps_its_digits_in_float32(distance, largest):
    """sum p (ln p - ln q) in float32 ends at 1e-7 nats; sum p (b + exp(-b) - 1) is of the size of the
    divergence. What is left is the rounding of the logits: 1e-7 of differences of 1e-3.
    """
    hidden, weight, *_ = inputs(torch.float32)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    hidden, moved = hidden.detach(), weight.detach() + distance * noise
    ours = linear_exact_kl(hidden, weight, hidden, moved, vocab_size=VOCAB).kl.detach()
    exact = dense(
        *(tensor.double() for tensor in (hidden, weight, hidden, moved)),
        torch.zeros(ROWS, dtype=torch.int64),
        1.0,
    )[0]
    assert largest / 10 < float(exact.detach().max()) < largest
    torch.testing.assert_close(ours.double(), exact.detach(), rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_divergence_of_hundreds_of_nats_is_exact(dtype):
    """Tiles without any mass of one model, and ratios of probabilities far beyond exp's range."""
    hidden, weight, reference_hidden, reference_weight, targets = inputs(dtype)
    tensors = [hidden.detach() * 40, weight, reference_hidden * 40, reference_weight, targets]
    expected = dense(*(t.double() if t.is_floating_point() else t for t in tensors), 1.0)[0].detach()
    assert expected.max() > 150
    ours = fused(*tensors)[0].detach()
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_tokens_leave_entropy_and_divergence_finite(dtype):
    """Logits of -inf in both models, whole tiles of them too: the numbers are those of the tokens left.

    The last hidden entry is 1 and its weight a bias, -inf for what is masked. Dense softmax over the columns
    that are left is the expected value.
    """
    hidden, weight, reference_hidden, reference_weight, targets = inputs(dtype)
    allowed = torch.tensor([0, 1, 2, 3, 11, 12, 30])
    targets = allowed[targets % len(allowed)]
    masked = torch.ones(PADDED, dtype=torch.bool).index_fill(0, allowed, False)

    def with_bias(rows, columns):
        rows, columns = rows.detach().clone(), columns.detach().clone()
        rows[:, -1], columns[:, -1] = 1.0, torch.where(masked, -torch.inf, columns[:, -1])
        return rows.requires_grad_(), columns.requires_grad_()

    actor, reference = with_bias(hidden, weight), with_bias(reference_hidden, reference_weight)
    ours = fused(*actor, *reference, targets)

    logits = [(rows @ columns[allowed].t()).double() for rows, columns in (actor, reference)]
    p, q = (values.log_softmax(-1) for values in logits)
    at_target = torch.searchsorted(allowed, targets).unsqueeze(1)
    expected = (
        (p.exp() * (p - q)).sum(-1),
        -(p.exp() * p).sum(-1),
        p.gather(1, at_target).squeeze(1),
        q.gather(1, at_target).squeeze(1),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad(values[0].sum() + values[1].sum(), actor[0], retain_graph=True)[0][:, :-1]
        for values in (ours, expected)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=10 * tolerance, atol=10 * tolerance)


def test_a_masked_target_has_a_log_prob_of_minus_infinity():
    hidden, weight, reference_hidden, reference_weight, targets = inputs()
    with torch.no_grad():
        hidden[:, -1], weight[targets[0], -1] = 1.0, -torch.inf
    logprobs = fused(hidden, weight, reference_hidden, reference_weight, targets)[2]
    assert torch.equal(logprobs.isneginf(), targets == targets[0])


def test_bfloat16_inputs_have_float32_statistics():
    tensors = inputs(torch.bfloat16)
    expected = dense(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors), 1.0)
    ours = fused(*tensors)
    for left, right in zip(ours, expected, strict=True):
        assert left.dtype == torch.float32
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-5)
    ours[0].sum().backward()
    assert tensors[0].grad.dtype == torch.bfloat16


def test_the_reference_gets_no_gradient():
    hidden, weight, reference_hidden, reference_weight, targets = inputs()
    reference_weight.requires_grad_()
    result = linear_exact_kl(hidden, weight, reference_hidden, reference_weight, targets, vocab_size=VOCAB)
    (result.kl.sum() + result.logprobs.sum()).backward()
    assert reference_weight.grad is None and not result.reference_logprobs.requires_grad


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, reference_hidden, reference_weight, _ = inputs()
    hidden = hidden.detach()[:0].requires_grad_()
    result = linear_exact_kl(hidden, weight, reference_hidden[:0], reference_weight, vocab_size=VOCAB)
    result.kl.sum().backward()
    assert result.kl.shape == (0,) and weight.grad.abs().max() == 0


def test_a_reference_of_other_rows_is_refused():
    hidden, weight, reference_hidden, reference_weight, _ = inputs()
    with pytest.raises(
        UserError, match="the reference has 6 rows and 40 columns, the actor 7 and 40; they must be equal"
    ):
        linear_exact_kl(hidden, weight, reference_hidden[:6], reference_weight, vocab_size=VOCAB)
