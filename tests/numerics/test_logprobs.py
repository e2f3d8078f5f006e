"""The fused output layer against dense float64 `torch.log_softmax`, on one rank.

Tolerances: float64 results may differ by summation order alone, so 1e-12 relative; float32 ones by the error
of a float32 dot product of length H, so 1e-5.
"""

import math

import pytest
import torch

from megagrpo.errors import UserError
from megagrpo.ops import logit_tiles, tiling
from megagrpo.ops.logprobs import linear_logprobs

VOCAB, PADDED, HIDDEN = 37, 40, 6


@pytest.fixture(params=[(3, 5), (512, 1024)], ids=["tiles of 3 x 5", "one tile"])
def tile_shape(request, monkeypatch):
    monkeypatch.setattr(logit_tiles, "choose_tiling", lambda num_rows, device: tiling.Tiling(*request.param))


def dense(hidden, weight, targets, temperature=1.0):
    """The definition: log softmax of the true columns, and its entropy."""
    temperature = torch.as_tensor(temperature, dtype=hidden.dtype).reshape(-1, 1)
    logprobs = torch.log_softmax(hidden @ weight[:VOCAB].t() / temperature, dim=-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(dim=1)


def fused(hidden, weight, targets, temperature=1.0, **options):
    result = linear_logprobs(
        hidden, weight, targets, vocab_size=VOCAB, temperature=temperature, compute_entropy=True, **options
    )
    return result.logprobs, result.entropy


def inputs(num_rows, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (num_rows,), generator=generator)
    if num_rows > 1:
        targets[0], targets[1] = 0, VOCAB - 1
    return hidden, weight, targets


@pytest.mark.parametrize("temperature", [1.0, 0.7, "per row"])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_values_equal_the_dense_log_softmax(tile_shape, num_rows, temperature):
    hidden, weight, targets = inputs(num_rows)
    temperature = torch.linspace(0.5, 2.0, num_rows) if temperature == "per row" else temperature
    for ours, expected in zip(
        fused(hidden, weight, targets, temperature), dense(hidden, weight, targets, temperature), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "per row"])
def test_gradients_pass_gradcheck(tile_shape, temperature):
    hidden, weight, targets = inputs(7)
    temperature = torch.linspace(0.5, 2.0, 7) if temperature == "per row" else temperature
    assert torch.autograd.gradcheck(lambda h, w: fused(h, w, targets, temperature), (hidden, weight))


def test_gradients_of_a_sequence_level_loss_equal_the_dense_ones(tile_shape):
    """A loss that couples all rows: nothing about it can be known chunk by chunk."""

    def loss(logprobs, entropy):
        return (logprobs.sum() / 7).exp() + (entropy * logprobs.detach()).mean()

    hidden, weight, targets = inputs(7)
    expected = torch.autograd.grad(loss(*dense(hidden, weight, targets)), (hidden, weight))
    ours = torch.autograd.grad(loss(*fused(hidden, weight, targets)), (hidden, weight))
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def test_padded_columns_never_take_part():
    hidden, weight, targets = inputs(5)
    with torch.no_grad():
        weight[VOCAB:] = 1e6
    logprobs, entropy = fused(hidden, weight, targets)
    torch.testing.assert_close(logprobs, dense(hidden, weight, targets)[0], rtol=1e-12, atol=1e-12)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad[VOCAB:].abs().max() == 0


def test_huge_logits_stay_finite_and_log_probs_never_positive(tile_shape):
    """Logits of +-1e4 overflow exp in float32; the online maximum keeps 2^(x - m) at most 1."""
    hidden, weight, targets = inputs(7, torch.float32)
    hidden = (hidden.detach() * 3e3).requires_grad_()
    logprobs, entropy = fused(hidden, weight, targets)
    (logprobs.sum() + entropy.sum()).backward()
    expected = dense(hidden.detach().double(), weight.detach().double(), targets)
    assert logprobs.max() <= 0 and entropy.min() >= 0
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-2)
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_bfloat16_inputs_have_float32_statistics(tile_shape):
    """The error against float64 on the same rounded inputs is that of float32: 1e-5, where bfloat16 logits
    would give 1e-2.
    """
    hidden, weight, targets = inputs(7, torch.bfloat16)
    logprobs, entropy = fused(hidden, weight, targets)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = dense(hidden.double(), weight.double(), targets)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: there the GEMMs keep float32 results of bfloat16 operands",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_dense_values_and_gradients(dtype):
    """Tolerance for gradients: the logit gradient is rounded to the operands' type before the GEMMs, 2^-8
    for bfloat16.
    """
    hidden, weight, targets = (tensor.detach().cuda() for tensor in inputs(7, dtype))
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    ours, expected = (
        fused(hidden.requires_grad_(), weight.requires_grad_(), targets, 0.7),
        dense(*exact, targets, 0.7),
    )
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-5)
    (ours[0].sum() + ours[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for left, right in zip((hidden, weight), exact, strict=True):
        torch.testing.assert_close(left.grad.double(), right.grad, rtol=tolerance, atol=tolerance)


def test_uniform_logits_have_the_entropy_of_the_uniform_distribution():
    hidden = torch.zeros(3, HIDDEN)
    result = linear_logprobs(
        hidden,
        torch.ones(PADDED, HIDDEN),
        torch.zeros(3, dtype=torch.int64),
        vocab_size=VOCAB,
        compute_entropy=True,
    )
    torch.testing.assert_close(result.entropy, torch.full((3,), math.log(VOCAB)))
    torch.testing.assert_close(result.logprobs, torch.full((3,), -math.log(VOCAB)))


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, targets = inputs(0)
    logprobs, entropy = fused(hidden, weight, targets)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, HIDDEN) and weight.grad.abs().max() == 0


def test_entropy_is_left_out_unless_asked_for():
    hidden, weight, targets = inputs(3)
    assert linear_logprobs(hidden, weight, targets, vocab_size=VOCAB).entropy is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, VOCAB])}, r"targets span 0 \.\. 37; allowed are 0 \.\. 36"),
        ({"targets": torch.tensor([0])}, r"targets is \[1\]"),
        ({"temperature": 0.0}, "temperature = 0.0; it must be above 0 and finite"),
        ({"temperature": math.inf}, "temperature = inf; it must be above 0 and finite"),
        ({"temperature": torch.tensor([1.0, 0.0])}, r"temperature\[1\] = 0.0; it must be above 0 and finite"),
        ({"temperature": torch.tensor([math.nan, 1.0])}, r"temperature\[0\] = nan"),
        ({"temperature": torch.tensor([1.0, -1.0])}, r"temperature\[1\] = -1.0"),
        ({"temperature": torch.ones(3)}, r"temperature is \[3\]"),
        ({"vocab_size": 41}, "vocab_size = 41, but 1 x 40 = 40 weight rows"),
        ({"hidden": torch.zeros(2, HIDDEN + 1)}, r"hidden is \[2, 7\]"),
        ({"hidden": torch.zeros(2, HIDDEN, dtype=torch.bfloat16)}, "one float type"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "hidden": torch.zeros(2, HIDDEN),
        "weight": torch.zeros(PADDED, HIDDEN),
        "targets": torch.tensor([0, 1]),
        "vocab_size": VOCAB,
    }
    with pytest.raises(UserError, match=message):
        linear_logprobs(**{**arguments, **change})
