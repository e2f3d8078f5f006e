"""Builds this rank's stage of a GPTModel from an HF folder."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megagrpo.config.model_folder import is_megatron_checkpoint
from megagrpo.device.device import has_cuda, megatron_region
from megagrpo.device.megatron_fixes import check_pipeline_flags
from megagrpo.models import families
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.hf_files import load_hf_weights
from megagrpo.models.megatron_files import load_megatron_model
from megagrpo.models.precision import Precision
from megagrpo.models.rope import PositionedRotaryEmbedding
from megagrpo.models.rules import Dimensions, ParameterRule, RuleTable
from megagrpo.models.spec import build_block_spec, canonical_name
from megagrpo.parallel.groups import ParallelGroups
from megagrpo.parallel.layout import ParallelLayout

# The vocabulary is padded to a multiple of this and of tp, so that all usual tp sizes share one padded size
# and a checkpoint written in one layout has the shapes of the others.
VOCAB_MULTIPLE = 16


@dataclass(frozen=True)
class StageModel:
    """This rank's part of a model, and what is needed to read its parameters as HF tensors."""

    # one, or several under interleaving; in the order in which the stage runs them
    chunks: tuple[GPTModel, ...]
    hf: HFConfig
    config: TransformerConfig
    dims: Dimensions
    rules: RuleTable
    groups: ParallelGroups

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.config.tensor_model_parallel_size

    @property
    def experts_per_rank(self) -> int:
        """Experts of a layer that this rank holds; 0 for a dense model."""
        return (self.hf.num_experts or 0) // self.groups.ep.size()

    def shard(self, rule: ParameterRule) -> tuple[int, int]:
        """Return (ranks that a parameter is split over, this rank's place among them)."""
        return (
            (self.groups.etp.size(), self.groups.etp_rank)
            if rule.is_expert
            else (self.tp, self.groups.tp_rank)
        )

    def named_rules(self) -> list[tuple[str, ParameterRule, int | None, torch.nn.Parameter]]:
        """Return (canonical name, rule, global layer or None, parameter) of every parameter of this stage."""
        rows = []
        first_expert = self.groups.ep_rank * self.experts_per_rank
        for chunk in self.chunks:
            layers = chunk.decoder.layers
            first_layer = layers[0].layer_number - 1 if len(layers) else 0
            for name, parameter in chunk.named_parameters():
                canonical = canonical_name(name, first_layer, first_expert)
                rows.append((canonical, *self.rules.find(canonical), parameter))
        return rows

    @property
    def output_weight(self) -> torch.Tensor:
        """The vocabulary-parallel output weight [Vp, H] of the last stage."""
        if self.chunks[-1].share_embeddings_and_output_weights:
            return self.chunks[-1].shared_embedding_or_output_weight()
        return self.chunks[-1].output_layer.weight

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what a distributed checkpoint holds of this stage. Shards carry global names, so any
        layout reads them.
        """
        return {
            f"chunk_{number}": chunk.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(self.chunks)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take in what was loaded in the form of `sharded_state_dict`."""
        for number, chunk in enumerate(self.chunks):
            chunk.load_state_dict(state[f"chunk_{number}"])


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size that Megatron holds: the next multiple of 16 and of tp."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def build_transformer_config(
    hf: HFConfig,
    groups: ParallelGroups,
    precision: Precision,
    sp: bool,
    recompute: str = "none",
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
        use_te: the layers will be Transformer Engine's; see `fused_kernel_fields`.
        overrides: fields of TransformerConfig that take the place of what follows from the rest.
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
        # Of the output layer, where it needs Apex; `fuse_weight_gradients` is for the decoder.
        "gradient_accumulation_fusion": False,
        **fused_kernel_fields(use_te),
        **precision.transformer_config_fields(),
        **FAMILIES.get(hf.model_type).transformer_config_fields(hf),
    }
    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config = TransformerConfig(**{**fields, **overrides})
    # Set afterwards: Megatron refuses `allgather` with variable lengths, which the dispatcher in experts.py
    # can.
    config.moe_token_dispatcher_type = moe_dispatcher
    check_pipeline_flags(config)
    return config


def fused_kernel_fields(use_te: bool) -> dict[str, bool]:
    """Return the TransformerConfig fields of the kernels that come with Transformer Engine.

    Rotary embeddings: without the fused kernel Megatron asks the device for the length of every packed
    sequence, twice a layer. SwiGLU: the product is not kept for the backward.
    """
    return {
        name: use_te for name in ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    }


def fuse_weight_gradients(decoder: torch.nn.Module) -> None:
    """Let the GEMMs of weight gradients in Transformer Engine's layers add to the float32 `main_grad`.

    Unfused, each micro-batch's product is rounded to bfloat16 first. Not by Megatron's field, which holds for
    the output layer too, and there needs Apex.
    """
    for module in decoder.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


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


def build_stage_model(
    hf: HFConfig, config: TransformerConfig, groups: ParallelGroups, device: torch.device, use_te: bool
) -> StageModel:
    """Build this rank's GPTModel chunks with untouched (random) weights. Their output is hidden states,
    see `return_hidden_states`.
    """
    families.load_all()
    dims = Dimensions(
        hf.num_attention_heads,
        hf.num_query_groups,
        hf.head_dim,
        hf.vocab_size,
        padded_vocab_size(hf.vocab_size, groups.tp.size()),
    )
    last = (groups.layout.vpp or 1) - 1
    chunks = []
    for number in range(last + 1):
        vp_stage = number if last else None
        with megatron_region():
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=build_block_spec(config, use_te, vp_stage),
                vocab_size=dims.padded_vocab_size,
                max_sequence_length=hf.max_position_embeddings,
                pre_process=groups.is_first_stage and number == 0,
                post_process=groups.is_last_stage and number == last,
                parallel_output=True,
                share_embeddings_and_output_weights=hf.tie_word_embeddings,
                position_embedding_type="rope",
                vp_stage=vp_stage,
            ).to(device)
        if use_te:
            fuse_weight_gradients(chunk.decoder)
        chunk.rotary_pos_emb = PositionedRotaryEmbedding(hf, device)
        chunks.append(chunk)
    if groups.is_last_stage:
        return_hidden_states(chunks[-1])
    model = StageModel(
        tuple(chunks), hf, config, dims, RuleTable(FAMILIES.get(hf.model_type).parameter_rules(hf)), groups
    )
    mark_split_parameters(model)
    return model


def mark_split_parameters(model: StageModel) -> None:
    """Tell Megatron which parameters are split over tp; it sets these marks only where it also initialises
    the weights.

    Without them the grad-norm counts a split parameter on the first tp rank only, silently, and clipping goes
    wrong. Experts are replicated over another group than the other parameters; Megatron knows (`allreduce`)
    only where ep > 1, so with ep = 1 and expert tensor parallel < tp it never adds up their gradients over
    tp. And marked in every layout, they have an optimizer of their own in every layout, so that a checkpoint
    has one structure.
    """
    for _, rule, _, parameter in model.named_rules():
        if rule.split_dimension is not None:
            for name, value in {
                "tensor_model_parallel": True,
                "partition_dim": rule.split_dimension,
                "partition_stride": 1,
            }.items():
                setattr(parameter, name, value)
        if rule.is_expert:
            parameter.allreduce = False


def return_hidden_states(module: GPTModel) -> None:
    """Make the last chunk return hidden states [1, T, H] instead of logits: the log-prob op multiplies only
    the rows it needs.

    Only the output layer's `forward` is replaced, on the instance: its weight, tied weight and sharded state
    dict stay as they are.
    """
    module.output_layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)


def load_stage_model(
    folder: str,
    hf: HFConfig,
    config: TransformerConfig,
    groups: ParallelGroups,
    device: torch.device,
    use_te: bool,
) -> StageModel:
    """Build this rank's part and read its weights: slices of an HF folder's tensors, or shards of a
    Megatron checkpoint.
    """
    model = build_stage_model(hf, config, groups, device, use_te)
    if is_megatron_checkpoint(folder):
        load_megatron_model(model, Path(folder))
    else:
        load_hf_weights(model, folder)
    return model
