"""Megatron's recompute of a module whose output is thrown away, where Transformer Engine is not installed."""

import importlib.util

import pytest
import torch

from megagrpo.device import device

device.setup()
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput  # noqa: E402


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_an_output_that_was_thrown_away_is_there_again_for_the_backward_pass():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    inputs = torch.tensor([5.0, 7.0], requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    thrown = checkpoint.checkpoint(lambda values: values * values, inputs)
    with device.megatron_region():
        result = thrown * weight
    checkpoint.discard_output_and_register_recompute(result)
    assert thrown.untyped_storage().nbytes() == 0
    result.sum().backward()
    assert weight.grad.tolist() == [25.0, 49.0] and inputs.grad.tolist() == [20.0, 42.0]
