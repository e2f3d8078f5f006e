"""This rank's stage of a model, built from an HF folder or a Megatron checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megagrpo.device.device import megatron_region
from megagrpo.models import families
from megagrpo.models.extra_states import drop_absent_extra_states, drop_empty_extra_states, load_state
from megagrpo.models.family import FAMILIES, HFConfig
from megagrpo.models.latent_attention import adapt_latent_attention
from megagrpo.models.rope import PositionedRotaryEmbedding
from megagrpo.models.rules import Dimensions, ParameterRule, RuleTable
from megagrpo.models.spec import build_block_spec, canonical_name
from megagrpo.models.transformer_config import padded_vocab_size
from megagrpo.parallel.groups import ParallelGroups


class StageParameter(NamedTuple):
    """One parameter of a stage; indices are global, None where there is none."""

    name: str  # as the rules have it
    rule: ParameterRule
    layer: int | None
    expert: int | None
    parameter: torch.Tensor  # a parameter, or a router's bias, which no gradient changes

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the HF tensors that it is made of."""
        return self.rule.hf_names(self.layer, self.expert)


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

    def named_rules(self) -> list[StageParameter]:
        """Return every parameter of this stage."""
        rows = []
        first_expert = self.groups.ep_rank * self.experts_per_rank
        for chunk in self.chunks:
            layers = chunk.decoder.layers
            first_layer = layers[0].layer_number - 1 if len(layers) else 0
            biases = [row for row in chunk.named_buffers() if row[0].endswith("router.expert_bias")]
            for name, parameter in [*chunk.named_parameters(), *biases]:
                canonical = canonical_name(name, first_layer, first_expert)
                rows.append(StageParameter(canonical, *self.rules.find(canonical), parameter))
        return rows

    @property
    def output_weight(self) -> torch.Tensor:
        """The vocabulary-parallel output weight [Vp, H] of the last stage."""
        if self.chunks[-1].share_embeddings_and_output_weights:
            return self.chunks[-1].shared_embedding_or_output_weight()
        return self.chunks[-1].output_layer.weight

    def sharded_state_dict(
        self, metadata: dict[str, Any] | None = None, read_from: Path | None = None, prefix: str = ""
    ) -> dict[str, Any]:
        """Return what a distributed checkpoint holds of this stage. Shards carry global names, so any
        layout and either layer spec reads them.

        Args:
            metadata: Megatron's options of the format.
            read_from: the checkpoint that is to be read into it; None: for a save.
            prefix: of the stage's names in the checkpoint.
        """
        state = {
            f"chunk_{number}": chunk.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(self.chunks)
        }
        for chunk in state.values():
            if read_from is None:
                drop_empty_extra_states(chunk)
            else:
                drop_absent_extra_states(chunk, read_from, prefix)
        if prefix:
            add_prefix_for_sharding(state, prefix)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take in what was loaded in the form of `sharded_state_dict`."""
        for number, chunk in enumerate(self.chunks):
            load_state(chunk, state[f"chunk_{number}"])


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
        if not adapt_latent_attention(chunk, hf, device):
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
    for _, rule, *_, parameter in model.named_rules():
        if rule.split_dimension is not None:
            for name, value in {
                "tensor_model_parallel": True,
                "partition_dim": rule.split_dimension,
                "partition_stride": 1,
            }.items():
                setattr(parameter, name, value)
        if rule.is_expert:
            parameter.allreduce = False


def fuse_weight_gradients(decoder: torch.nn.Module) -> None:
    """Let the GEMMs of weight gradients in Transformer Engine's layers add to the float32 `main_grad`.

    Unfused, each micro-batch's product is rounded to bfloat16 first. Not by Megatron's field, which holds for
    the output layer too, and there needs Apex.
    """
    for module in decoder.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def return_hidden_states(module: GPTModel) -> None:
    """Make the last chunk return hidden states [1, T, H] instead of logits: the log-prob op multiplies only
    the rows it needs.

    Only the output layer's `forward` is replaced, on the instance: its weight, tied weight and sharded state
    dict stay as they are.
    """
    module.output_layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)
