"""The mode that sends CUDA calls to the CPU holds in a backward pass too."""

import pytest
import torch

from megagrpo.device import cpu, device

pytestmark = pytest.mark.skipif(device.has_cuda(), reason="the adapter is for machines without CUDA")


class AsksForCuda(torch.autograd.Function):
    """As kernels of Transformer Engine and Megatron do: makes a tensor on the GPU in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.ones(gradient.shape, device="cuda") + gradient.new_zeros(3).cuda()


def _leaf() -> torch.Tensor:
    device.setup()
    return torch.zeros(3, requires_grad=True)


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, x: loss.backward(),
        lambda loss, x: torch.autograd.backward(loss),
        lambda loss, x: setattr(x, "grad", torch.autograd.grad(loss, x)[0]),
    ],
    ids=["Tensor.backward", "autograd.backward", "autograd.grad"],
)
def test_a_backward_that_starts_in_a_region_runs_in_it(backward):
    x = _leaf()
    with cpu.region():
        backward(AsksForCuda.apply(x).sum(), x)
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_backward_outside_of_a_region_is_left_alone():
    x = _leaf()
    with cpu.region():
        loss = AsksForCuda.apply(x).sum()
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        loss.backward()


def test_a_region_that_ends_by_an_exception_is_over():
    x = _leaf()
    with pytest.raises(ZeroDivisionError), cpu.region():
        raise ZeroDivisionError
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        AsksForCuda.apply(x).sum().backward()
