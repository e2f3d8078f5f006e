"""The compiled passes that accelerators take, compiled for the CPU here: the same numbers as the definition.

Tolerances: float64, summation order alone. Not covered: the code that the compiler makes for a GPU.
"""

import shutil

import pytest
import torch

from megagrpo.ops import logit_gradient, logit_tiles, row_statistics, tiling
from megagrpo.ops.logprobs import linear_logprobs
from megagrpo.ops.token_loss import linear_token_loss

VOCAB, HIDDEN, ROWS = 37, 6, 7

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """Tiles of 3 x 5 with a narrower last one, through the compiled passes."""
    for module in (row_statistics, logit_gradient, logit_tiles):
        monkeypatch.setattr(module, "is_fused", lambda device: True)
    monkeypatch.setattr(logit_tiles, "choose_tiling", lambda num_rows, device: tiling.Tiling(3, 5))


def loss(logprobs, entropy, rows=slice(None)):
    return logprobs.exp() - 0.3 * entropy


def test_values_and_gradients_equal_the_dense_ones_in_both_forms():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)

    dense = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)
    logprobs, entropy = dense.gather(1, targets[:, None])[:, 0], -(dense.exp() * dense).sum(1)
    expected = torch.autograd.grad(loss(logprobs, entropy).sum(), (hidden, weight), retain_graph=True)
    options = {"vocab_size": VOCAB, "temperature": 0.7, "compute_entropy": True}

    recomputed = linear_logprobs(hidden, weight, targets, **options)
    formed = linear_token_loss(hidden, weight, targets, loss, **options)
    for ours in (recomputed, formed):
        torch.testing.assert_close((ours.logprobs, ours.entropy), (logprobs, entropy), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(loss(recomputed.logprobs, recomputed.entropy).sum(), (hidden, weight))
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(formed.loss, (hidden, weight)), expected, rtol=1e-11, atol=1e-12
    )


def test_scoring_needs_no_moment():
    hidden, weight = (
        torch.randn(ROWS, HIDDEN, dtype=torch.float64),
        torch.randn(VOCAB, HIDDEN, dtype=torch.float64),
    )
    targets = torch.arange(ROWS)
    ours = linear_logprobs(hidden, weight, targets, vocab_size=VOCAB).logprobs
    expected = torch.log_softmax(hidden @ weight.t(), dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
