"""Adapts Megatron's latent attention to packed trees on the local spec."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megagrpo.models.family import HFConfig
from megagrpo.models.rope import PositionedRotaryEmbedding, rotary_scale


def adapt_latent_attention(chunk: GPTModel, hf: HFConfig, device: torch.device) -> bool:
    """Adapt the attention of a chunk's layers. Returns False where it is not latent."""
    latent = [module for module in chunk.modules() if isinstance(module, MultiLatentAttention)]
    for module in latent:
        module.rotary_pos_emb = LatentRotaryEmbedding(hf, device)
        sum_shared_key_gradients(module)
    return hf.has_latent_attention


def sum_shared_key_gradients(attention: MultiLatentAttention) -> None:
    """Let the rotated part of the keys, which all heads share, get the gradients of all heads.

    On the local spec Megatron (0.16.1) gathers the columns of `linear_kv_down_proj` and hands the rotated
    ones to the heads of each tp rank. The gather's backward keeps this rank's columns of the gradients of
    this rank's heads; so they are summed first. Here the projection gives whole columns, as Transformer
    Engine's duplicated one does, and Megatron finds nothing left to gather.
    """
    project, config = attention.linear_kv_down_proj.forward, attention.config

    def whole(hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        columns = gather_from_tensor_model_parallel_region(project(hidden)[0])
        if config.sequence_parallel:
            return scatter_to_sequence_parallel_region(columns), None
        latent, rotated = columns.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, copy_to_tensor_model_parallel_region(rotated)], dim=-1), None

    if config.tensor_model_parallel_size > 1:
        attention.linear_kv_down_proj.forward = whole


class LatentRotaryEmbedding(PositionedRotaryEmbedding):
    """Takes the place of `rotary_pos_emb` of an attention with latent keys and values, in packed trees alone.

    Megatron's module squeezes the batch dimension of packed tokens, and asks for the scale of YaRN beside the
    angles.
    """

    def __init__(self, hf: HFConfig, device: torch.device):
        super().__init__(hf, device)
        self.scale = rotary_scale(hf) if hf.rope_type == "yarn" else None

    def forward(self, positions: torch.Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Return the angles [T, 1, rotary_dim]; under `yarn` (angles, factor of their cosines and sines)."""
        angles = super().forward(positions)[:, 0]
        return angles if self.scale is None else (angles, self.scale)
