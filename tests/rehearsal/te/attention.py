"""Attention over packed (thd) sequences and rotary embeddings."""

import itertools

import torch

from te.enums import ENUMS
from te.registry import kernel


def _attention(q, k, v, boundaries, causal, scale):
    out, boundaries = [], boundaries or [0, len(q)]
    for start, end in itertools.pairwise(boundaries):
        parts = [t[start:end].transpose(0, 1).float() for t in (q, k, v)]
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                *parts, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(0, 1)
        )
    return torch.cat(out)


@kernel
def convert_thd_to_bshd(tensor, cu_seqlens, b, max_seq_len):
    lengths = cu_seqlens.diff().tolist()
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for row, part in zip(out, tensor.split(lengths), strict=True):
        row[: len(part)] = part
    return out


@kernel
def convert_bshd_to_thd(tensor, cu_seqlens, t):
    return torch.cat([row[:length] for row, length in zip(tensor, cu_seqlens.diff().tolist(), strict=True)])


@kernel
def get_fused_attn_backend(
    is_training,
    q_dtype,
    kv_dtype,
    qkv_layout,
    bias_type,
    mask_type,
    softmax_type,
    dropout,
    heads,
    gqa_groups,
    max_q,
    max_kv,
    head_dim_qk,
    head_dim_v,
    left,
    right,
    *newer,
):
    """cuDNN's choice (fused_attn.cpp), for what the product can ask."""
    kinds = ENUMS["NVTE_Fused_Attn_Backend"]
    half = q_dtype.name in ("kFloat16", "kBFloat16") and head_dim_qk % 8 == 0
    padded = "THD" not in qkv_layout.name or "PADDING" in mask_type.name
    return kinds.NVTE_F16_arbitrary_seqlen if half and padded else kinds.NVTE_No_Backend


def _boundaries(cu_seqlens, padded):
    if type(cu_seqlens).__name__ == "FakeTensor":  # nothing is computed, and a kernel does not wait
        return None
    assert padded is None or torch.equal(cu_seqlens, padded), (
        "sequences with padding between them are not rehearsed"
    )
    return cu_seqlens.tolist()


@kernel
def fused_attn_fwd(
    max_q,
    max_kv,
    is_training,
    scale,
    dropout,
    zero_fill,
    layout,
    bias_type,
    mask,
    softmax,
    window,
    cu_q,
    cu_kv,
    q,
    k,
    v,
    fake_dtype,
    cu_q_padded,
    cu_kv_padded,
    *rest,
):
    assert layout.name in ("NVTE_THD_THD_THD",), f"{layout}: only thd is rehearsed"
    out = _attention(q, k, v, _boundaries(cu_q, cu_q_padded), "CAUSAL" in mask.name, scale).to(q.dtype)
    return [out, torch.empty(0), torch.zeros(2, dtype=torch.int64)]


@kernel
def fused_attn_bwd(
    max_q,
    max_kv,
    scale,
    dropout,
    zero,
    layout,
    bias_type,
    mask,
    softmax,
    window,
    deterministic,
    cu_q,
    cu_kv,
    q,
    k,
    v,
    o,
    do,
    fake_dtype,
    dqkv_dtype,
    aux,
    cu_q_padded,
    cu_kv_padded,
    *rest,
):
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = _attention(*leaves, _boundaries(cu_q, cu_q_padded), "CAUSAL" in mask.name, scale)
        grads = torch.autograd.grad(out, leaves, do.float())
    return [grad.to(t.dtype) for grad, t in zip(grads, (q, k, v), strict=True)] + [None, None]


def _positions(length, cp_size, cp_rank):
    """Of the tokens of one sequence that a context parallel rank holds: its piece from the front, and as many
    from the back.
    """
    if cp_size == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * cp_size)
    return torch.cat([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]])


def _rope(t, freqs, interleaved, cu_seqlens, cp_size, cp_rank, sign):
    assert not interleaved
    if type(t).__name__ == "FakeTensor":
        return torch.empty_like(t)
    positions = (
        torch.cat([_positions(n, cp_size, cp_rank) for n in cu_seqlens.diff().tolist()])
        if cu_seqlens is not None
        else torch.arange(t.shape[0])
    )
    angle = freqs.float().view(freqs.shape[0], -1)[positions]
    angle = angle.view(len(positions), *[1] * (t.dim() - 2), -1)
    x, rest = t[..., : angle.shape[-1]].float(), t[..., angle.shape[-1] :]
    first, second = x.chunk(2, -1)
    return torch.cat(
        ((x * angle.cos() + sign * torch.cat((-second, first), -1) * angle.sin()).to(t.dtype), rest), -1
    )


@kernel
def fused_rope_forward(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rope(input, freqs, interleaved, cu_seqlens, cp_size, cp_rank, 1)


@kernel
def fused_rope_backward(grad, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rope(grad, freqs, interleaved, cu_seqlens, cp_size, cp_rank, -1)
