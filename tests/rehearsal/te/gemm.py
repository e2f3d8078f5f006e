"""GEMMs, norms, activations and the optimizer's kernels, computed in float32."""

import math

import torch

from te.enums import DTYPES, ENUMS
from te.fp8 import dequantize
from te.registry import kernel


def plain(tensor):
    """A float32 tensor of what a (possibly FP8) operand stands for."""
    if hasattr(tensor, "_scale_inv"):
        return dequantize(tensor, ENUMS["DType"].kFloat32)
    return (tensor.dequantize() if hasattr(tensor, "_fp8_dtype") else tensor).float()


def finish(value, out, quantizer, dtype):
    """Store a kernel's float32 result where and as its caller wants it."""
    if quantizer is not None:
        return (
            quantizer(value.to(dtype) if dtype else value)
            if out is None
            else quantizer.update_quantized(value, out) or out
        )
    if out is None:
        return value.to(dtype)
    out.copy_(value.view(out.shape))
    return out


@kernel
def generic_gemm(
    A,
    transA,
    B,
    transB,
    D,
    quantizer,
    output_dtype,
    bias,
    bias_type,
    gelu,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap=False,
    alpha=1.0,
    beta=None,
):
    a, b = plain(A), plain(B)
    shape = ([b.shape[-1]] if transB else list(b.shape[:-1])) + [
        math.prod(a.shape[:-1]) if transA else a.shape[-1]
    ]
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    assert (a.shape[1] if transA else a.shape[0]) == (b.shape[0] if transB else b.shape[1]), (
        f"GEMM {a.shape} {transA} {b.shape} {transB}"
    )
    value = alpha * ((b.t() if transB else b) @ (a.t() if transA else a)).view(shape)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(bias.dtype)
    elif bias is not None:
        value = value + bias.float()
    assert not gelu and comm_overlap is None
    dtype = (
        DTYPES[output_dtype.name]
        if output_dtype is not None
        else (D.dtype if D is not None else getattr(A, "dtype", torch.bfloat16))
    )
    if D is not None and accumulate:
        D.add_(value.view(D.shape))
        return [D, bias_grad, None, extra_output]
    return [finish(value, D, quantizer, dtype), bias_grad, None, extra_output]


@kernel
def te_general_grouped_gemm(
    A,
    transa,
    B,
    transb,
    D,
    D_type,
    m_splits,
    bias,
    bias_type,
    single_output,
    pre_gelu,
    grad,
    workspace,
    size,
    accumulate,
    split_accumulator,
    sm_count,
):
    outs = list(D[0].split(m_splits)) if single_output else D
    for i, out in enumerate(outs):
        a, b = plain(A[i]), plain(B[i])
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
        value = (b.t() if transb else b) @ (a.t() if transa else a)
        if bias[i].numel() and not grad:
            value = value + bias[i].float()
        elif bias[i].numel():
            bias[i].copy_(b.sum(0))
        out.add_(value.view(out.shape)) if accumulate else out.copy_(value.view(out.shape))
    return bias


@kernel
def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    x, gamma = input.float(), weight.float() + float(zero_centered_gamma)
    rsigma = (x.pow(2).mean(-1) + eps).rsqrt()
    return [finish(x * rsigma[:, None] * gamma, ln_out, quantizer, DTYPES[otype.name]), None, rsigma]


@kernel
def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    normed, scaled = x.float() * rsigma[:, None], dz.float() * (gamma.float() + float(zero_centered_gamma))
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)]


@kernel
def fused_multi_row_padding(input, output, rows, padded_rows):
    output.zero_()
    for source, target in zip(input.split(rows), output.split(padded_rows), strict=True):
        target[: len(source)] = source


@kernel
def fused_multi_row_unpadding(input, output, padded_rows, rows):
    for source, target in zip(input.split(padded_rows), output.split(rows), strict=True):
        target.copy_(source[: len(target)])


@kernel
def swiglu(input, quantizer):
    gate, up = input.float().chunk(2, -1)
    return finish(torch.nn.functional.silu(gate) * up, None, quantizer, input.dtype)


@kernel
def dswiglu(grad, fwd_input, quantizer):
    with torch.enable_grad():
        leaf = fwd_input.float().detach().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        (result,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, leaf, grad.float())
    return finish(result, None, quantizer, fwd_input.dtype)


@kernel
def multi_tensor_scale(chunk_size, noop_flag, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)


@kernel
def multi_tensor_l2norm(chunk_size, noop_flag, lists, per_tensor=False):
    norms = torch.stack([t.float().norm() for t in lists[0]])
    return norms.norm().view(1), norms if per_tensor else torch.empty(0)


@kernel
def multi_tensor_adam(
    chunk_size, noop_flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
):
    for grad, param, first, second, *master in zip(*lists, strict=True):
        target = (master[0] if master else param).float()
        grad = grad.float() + (weight_decay * target if mode == 0 else 0)
        first.copy_(beta1 * first.float() + (1 - beta1) * grad)
        second.copy_(beta2 * second.float() + (1 - beta2) * grad * grad)
        c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
        update = first.float() / c1 / ((second.float() / c2).sqrt() + eps) + (
            weight_decay * target if mode == 1 else 0
        )
        param.copy_(target - lr * update)
        if master:
            master[0].copy_(target - lr * update)
