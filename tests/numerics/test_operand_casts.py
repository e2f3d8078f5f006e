"""How often a tile of logit gradients is rounded to the type of the GEMMs, on a device that is made up.

Tensors on the device meta know shapes and types and compute nothing, and take the way of an accelerator; what
is counted are the operations that one would run.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.ops import logit_gradient
from megagrpo.ops.logit_gradient import LogitGradient, backpropagate
from megagrpo.ops.logit_tiles import LogitTiles
from megagrpo.ops.vocab_shard import VocabShard
from megagrpo.ops.weight_gradient import WeightGradient

ROWS, HIDDEN, VOCAB = 8192, 64, 16384  # two tiles of rows by two of columns


class CountedCasts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.of_tiles = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default
        self.of_tiles += is_cast and args[0].dim() == 2 and args[0].numel() >= 4096 * 8192
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_both", [True, False])
def test_a_tile_is_rounded_once_for_both_of_its_products(monkeypatch, with_both):
    monkeypatch.setattr(logit_gradient, "tile_gradient_", lambda *arguments: None)  # one compiled kernel
    with torch.no_grad():
        hidden = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device="meta")
        tiles = LogitTiles(hidden, weight, VocabShard.of(weight, VOCAB, None), 1.0)
        assert len(list(tiles.rows())) * len(list(tiles.columns())) == 4
        gradient = LogitGradient(tiles, torch.empty(ROWS, device="meta"))
        grad_hidden = torch.empty(ROWS, HIDDEN, device="meta")
        grad_weight = WeightGradient(weight, to_main_grad=False) if with_both else None
        with CountedCasts() as casts:
            backpropagate(gradient, grad_hidden, grad_weight)
    assert casts.of_tiles == 4
    if grad_weight is not None:
        assert grad_weight.buffer.dtype == torch.float32
