"""The output layer's largest allocation, counted at torch's dispatcher: it must not grow with the number of
tokens.

Only results of [T, H] (the hidden gradient) and [Vp, H] (the weight's) may be larger than the tiles and the
stash.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.ops import tiling
from megagrpo.ops.exact_kl import linear_exact_kl
from megagrpo.ops.logprobs import linear_logprobs
from megagrpo.ops.token_loss import linear_token_loss

VOCAB, HIDDEN, TILE_ELEMENTS, STASH_BYTES = 2048, 4, 32 * 64, 1 << 16


class LargestAllocation(TorchDispatchMode):
    """Remembers the largest storage that any operation returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiling, "_CPU_TILE_ROWS", 32)
    monkeypatch.setattr(tiling, "_CPU_TILE_COLUMNS", 64)
    monkeypatch.setattr(tiling, "_CPU_TILE_ELEMENTS", TILE_ELEMENTS)
    monkeypatch.setattr(tiling, "_CPU_STASH_BYTES", STASH_BYTES)


def inputs(num_rows):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    # As under Megatron: the weight's gradient has its memory already.
    weight.main_grad = torch.zeros(VOCAB, HIDDEN)
    return hidden, weight, torch.randint(VOCAB, (num_rows,), generator=generator)


def sequence_level(hidden, weight, targets):
    result = linear_logprobs(hidden, weight, targets, vocab_size=VOCAB, compute_entropy=True)
    (result.logprobs.sum() + result.entropy.sum()).backward()


def token_level(hidden, weight, targets):
    linear_token_loss(
        hidden,
        weight,
        targets,
        lambda logprobs, entropy, rows: logprobs + entropy,
        vocab_size=VOCAB,
        compute_entropy=True,
    ).loss.backward()


def exact_kl(hidden, weight, targets):
    linear_exact_kl(
        hidden, weight, hidden.detach() / 2, weight.detach(), vocab_size=VOCAB
    ).kl.sum().backward()


@pytest.mark.parametrize(
    ("run", "allowed"),
    [(sequence_level, 4 * TILE_ELEMENTS), (exact_kl, 4 * TILE_ELEMENTS), (token_level, STASH_BYTES)],
    ids=["sequence level", "exact KL", "token level"],
)
@pytest.mark.parametrize("num_rows", [100, 400])
def test_nothing_larger_than_tiles_and_results_is_allocated(run, allowed, num_rows):
    tensors = inputs(num_rows)
    with LargestAllocation() as largest:
        run(*tensors)
    results = max(tensors[0].numel(), tensors[1].numel()) * 4
    assert largest.bytes <= max(allowed, results) < num_rows * VOCAB * 4 / 5


def test_the_dense_way_would_be_noticed():
    hidden, weight, _ = inputs(100)
    with LargestAllocation() as largest:
        torch.log_softmax(hidden @ weight.t(), dim=-1)
    assert largest.bytes >= 100 * VOCAB * 4
