"""Layer specs: Transformer Engine on CUDA, local modules elsewhere; and the names their parameters share."""

import importlib.util
import re
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megagrpo.device.device import has_cuda
from megagrpo.errors import UserError
from megagrpo.models.attention import PackedTreeAttention
from megagrpo.models.experts import use_sequence_routing

AttentionChoice = Literal["auto", "local", "te"]
# Transformer Engine fuses a norm into the linear that follows it; our rules name the unfused parameter.
TE_FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class RMSNorm(torch.nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467, Eq. 4) for the local spec; Megatron's local norm
    needs Apex.

    Under sequence parallelism each rank sees a part of the tokens only: the mark on the weight makes Megatron
    all-reduce its gradient over tensor parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__()
        self.eps, self.hidden_size = eps, hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(hidden, (self.hidden_size,), self.weight, self.eps)


class LatentNorm(RMSNorm):
    """Norm of the latents of queries, and of keys and values; DeepSeek's code gives it its own epsilon."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any):
        super().__init__(config, hidden_size, eps=1e-6)


def uses_transformer_engine(
    choice: AttentionChoice, params_dtype: torch.dtype, has_latent_attention: bool = False
) -> bool:
    """Resolve `model.attention`. `auto` is the local spec in float32, for which Transformer Engine up to 2.10
    has no attention over packed sequences: float32 on a GPU is for comparisons. Latent attention, whose rules
    name and split the parameters of the local spec, has no other.

    Raises:
        UserError: `te` where CUDA or Transformer Engine is missing, or for latent attention.
    """
    if has_latent_attention:
        if choice == "te":
            raise UserError("model.attention: te: this family has latent attention; use auto or local")
        return False
    missing = [] if has_cuda() else ["a CUDA device"]
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("the package transformer-engine (extra `te`)")
    if choice == "te" and missing:
        raise UserError(f"model.attention: te needs {' and '.join(missing)}; use auto or local")
    return choice == "te" or (choice == "auto" and not missing and params_dtype != torch.float32)


def build_block_spec(
    config: TransformerConfig, use_te: bool, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this stage (of its chunk `vp_stage` under interleaving) and of the
    final norm.
    """
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        def build(num_experts: int | None) -> ModuleSpec:
            return get_gpt_layer_with_transformer_engine_spec(
                num_experts=num_experts,
                moe_grouped_gemm=config.moe_grouped_gemm if num_experts else False,
                qk_layernorm=config.qk_layernorm,
            )

        norm = TENorm
    else:

        def build(num_experts: int | None) -> ModuleSpec:
            return _local_layer_spec(config, num_experts)

        norm = RMSNorm
    dense = build(None)
    sparse = dense
    if config.num_moe_experts:
        sparse = build(config.num_moe_experts)
        use_sequence_routing(sparse)
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    specs = [sparse if layer in sparse_layers(config) else dense for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def sparse_layers(config: TransformerConfig) -> list[int]:
    """Return the global indices of the layers that are mixtures of experts."""
    if not config.num_moe_experts:
        return []
    pattern = config.moe_layer_freq
    return [layer for layer in range(config.num_layers) if isinstance(pattern, int) or pattern[layer]]


def _local_layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    if num_experts:
        # Megatron names this norm as the dense layers' fused one; Transformer Engine's layers do not
        spec.submodules.sharded_state_dict_keys_map = {
            name: renamed
            for name, renamed in spec.submodules.sharded_state_dict_keys_map.items()
            if not name.startswith("pre_mlp_layernorm")
        }
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedTreeAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return spec


def canonical_name(name: str, first_layer: int, first_expert: int = 0) -> str:
    """Return the name that the rules use: global layer and expert indices, unfused norms.

    Args:
        name: parameter name within a GPTModel, with the stage's own layer index and the rank's own expert
            index.
        first_layer: global index of the stage's first layer.
        first_expert: global index of the first expert of the expert parallel rank.
    """
    found = re.match(r"(decoder\.layers\.)(\d+)\.(.+)", name)
    if not found:
        return name
    rest = TE_FUSED_NAMES.get(found.group(3), found.group(3))
    # a grouped linear holds the weight of expert 3 as its `weight3`
    rest = re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", rest)
    rest = re.sub(r"(?<=local_experts\.)\d+", lambda index: str(int(index.group()) + first_expert), rest)
    return f"{found.group(1)}{int(found.group(2)) + first_layer}.{rest}"
