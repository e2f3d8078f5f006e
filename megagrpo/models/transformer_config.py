"""Megatron's configuration of a model: sizes, precision, pipeline chunks."""

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megagrpo.device.device import has_cuda
from megagrpo.device.megatron_fixes import check_pipeline_flags
from megagrpo.errors import UserError
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.precision import Precision
from megagrpo.parallel.groups import ParallelGroups
from megagrpo.parallel.layout import ParallelLayout

# The vocabulary is padded to a multiple of this and of tp, so that all usual tp sizes share one padded size
# and a checkpoint written in one layout has the shapes of the others.
VOCAB_MULTIPLE = 16


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size that Megatron holds: the next multiple of 16 and of tp."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def build_transformer_config(
    hf: HFConfig,
    groups: ParallelGroups,
    precision: Precision,
    sp: bool,
    recompute: Sequence[str] = (),
    moe_dispatcher: str = "alltoall",
    router_aux_loss_coef: float = 0.0,
    use_te: bool = False,
    **overrides: Any,
) -> TransformerConfig:
    """Return Megatron's configuration of a model.

    `calculate_per_token_loss` makes Megatron sum losses and gradients over micro-batches and data parallel
    ranks without any
    division: every division is in our token weights.

    Args:
        recompute: full, or the parts of a layer that are computed again (`update.recompute`).
        use_te: the layers will be Transformer Engine's; see `fused_kernel_fields`.
        overrides: fields of TransformerConfig that take the place of what follows from the rest.

    Raises:
        UserError: Transformer Engine can't compute this model in this layout.
    """
    fields: dict[str, Any] = {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.ffn_hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_query_groups,
        "kv_channels": hf.head_dim,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": groups.tp.size(),
        "pipeline_model_parallel_size": groups.pp.size(),
        "context_parallel_size": groups.cp.size(),
        **pipeline_fields(groups.layout, hf.num_layers),
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.etp.size(),
        "moe_aux_loss_coeff": router_aux_loss_coef,
        "sequence_parallel": sp,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths asserts it, for dense models too
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not has_cuda(),
        "perform_initialization": False,  # every parameter is read from the HF folder or a checkpoint
        "masked_softmax_fusion": False,
        # This one is about the output layer, where it needs Apex; `fuse_weight_gradients` is for the decoder.
        "gradient_accumulation_fusion": False,
        **fused_kernel_fields(use_te, has_experts=bool(hf.num_experts)),
        **precision.transformer_config_fields(),
        **FAMILIES.get(hf.model_type).transformer_config_fields(hf),
    }
    if use_te and fields.get("window_size") and groups.cp.size() > 1:
        raise UserError(
            f"parallel.cp: {groups.cp.size()}: Transformer Engine's ring attention knows no sliding window; "
            "use cp 1, or model.attention: local"
        )
    if "full" in recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute:
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    config = kind(**{**fields, **overrides})
    # Set afterwards: Megatron refuses `allgather` with variable lengths, which the dispatcher in experts.py
    # can.
    config.moe_token_dispatcher_type = moe_dispatcher
    check_pipeline_flags(config)
    return config


def fused_kernel_fields(use_te: bool, has_experts: bool) -> dict[str, bool]:
    """Return the TransformerConfig fields of the kernels that come with Transformer Engine.

    Rotary embeddings: without the fused kernel Megatron asks the device for the length of every packed
    sequence, twice a layer. SwiGLU: the product is not kept for the backward. Experts: one grouped GEMM for
    all that a rank holds, in place of a loop over them that asks the device for each one's token count.
    """
    names = ["apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"]
    names += ["moe_grouped_gemm", "moe_permute_fusion"] if has_experts else []
    return dict.fromkeys(names, use_te)


def pipeline_fields(layout: ParallelLayout, num_layers: int) -> dict[str, Any]:
    """Return the TransformerConfig fields that cut the layers into pipeline chunks; any split is written
    out.
    """
    if layout.pp == 1:
        return {}
    chunks = [["decoder"] * layers for layers in layout.chunk_layers(num_layers)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return {
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "pipeline_model_parallel_layout": chunks,
        # Batched p2p gives wrong gradients under interleaving on two stages, see `check_pipeline_flags`.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
    }
