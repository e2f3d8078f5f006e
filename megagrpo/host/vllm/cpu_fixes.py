"""Fixes that let vLLM 0.32 run our models on a CPU. Imported in vLLM's workers before a model is built.

Packed weights. In float32 vLLM computes with copies of the weights that are packed for oneDNN. A linear layer
gives its parameter up for its copy, so there is nothing left to load new weights into. And vLLM's own reload
leaves out the copy of an output layer that is tied to the embedding: it computes with the old weights from
then on, without any error. Here the parameters stay, and `pack_weights` rebuilds every copy. (Without packed
copies a decode step of SmolLM2 costs 1.4 times as much.) Experts are packed in their own parameters: new
weights would be read in an order that they are not in. They too get packed copies here, beside parameters
that stay as they are.

Head sizes. vLLM's CPU kernels know a few sizes of attention heads, the smallest is 32; tiny models have
smaller ones. Queries, keys and values are padded with zeros to the next size that it knows: zeros add nothing
to a score, and the padding of the output is cut off.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from megagrpo.host.vllm import cpu_fp8

_pack_layer = layer_utils.dispatch_cpu_unquantized_gemm
_build_attention: Callable[..., None] = Attention.__init__
_attend: Callable[..., torch.Tensor] = Attention.forward
_pack_experts: Callable[..., None] = CPUUnquantizedExperts.process_weights_after_loading
_apply_experts: Callable[..., None] = CPUUnquantizedExperts.apply
# with the layer that holds their parameters
_packed_experts: list[tuple[CPUUnquantizedExperts, torch.nn.Module]] = []


def apply_fixes() -> None:
    """Put the fixes in place; every model that is built afterwards has them."""
    cpu_fp8.install()
    # both of vLLM's callers look it up when they call it
    layer_utils.dispatch_cpu_unquantized_gemm = _pack_layer_and_keep_weight
    Attention.__init__, Attention.forward = _build_padded_attention, _attend_padded
    CPUUnquantizedExperts.process_weights_after_loading = _note_and_pack_experts
    CPUUnquantizedExperts.apply = _apply_packed_experts


def pack_weights(model: torch.nn.Module) -> None:
    """Rebuild every packed copy from its parameter."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            _pack_layer(module, remove_weight=False)
    for experts, layer in _packed_experts:
        _renew_packed_experts(experts, layer)


def _pack_layer_and_keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    _pack_layer(layer, remove_weight=False)


def _note_and_pack_experts(self: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    _packed_experts.append((self, layer))
    _renew_packed_experts(self, layer)


def _renew_packed_experts(experts: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    """Let vLLM pad and pack the parameters of a stand-in, which begins with the layer's own."""
    stand_in = torch.nn.Module()
    for name in ("w13_weight", "w2_weight"):
        setattr(stand_in, name, torch.nn.Parameter(getattr(layer, name).data, requires_grad=False))
    _pack_experts(experts, stand_in)
    experts.packed_weights = (stand_in.w13_weight, stand_in.w2_weight)


def _apply_packed_experts(
    self: CPUUnquantizedExperts,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> None:
    _apply_experts(self, output, hidden_states, *self.packed_weights, *arguments, **options)


def _build_padded_attention(
    self: Attention, num_heads: int, head_size: int, scale: float, *arguments: Any, **options: Any
) -> None:
    known = [size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_size]
    _build_attention(self, num_heads, min(known, default=head_size), scale, *arguments, **options)
    self.true_head_size = head_size


def _attend_padded(
    self: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    if self.true_head_size == self.head_size:
        return _attend(self, query, key, value, *arguments, **options)
    query, key, value = (
        _pad_heads(states, self.true_head_size, self.head_size) for states in (query, key, value)
    )
    output = _attend(self, query, key, value, *arguments, **options)
    heads = output.view(output.shape[0], self.num_heads, self.head_size)
    return heads[..., : self.true_head_size].reshape(output.shape[0], -1)


def _pad_heads(states: torch.Tensor | None, size: int, padded: int) -> torch.Tensor | None:
    """Return states [tokens, heads * size] as [tokens, heads * padded]."""
    if states is None:
        return None
    heads = states.reshape(states.shape[0], -1, size)
    return torch.nn.functional.pad(heads, (0, padded - size)).flatten(1)
