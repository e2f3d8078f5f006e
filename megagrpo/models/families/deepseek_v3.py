"""DeepSeek-V3, R1 and V3.1 (`model_type: deepseek_v3`), and what has their shape: Moonlight, Kimi K2."""

from typing import Any

from megagrpo.models.biased_routing import (
    EXAMPLE_FIELDS,
    READ_FIELDS,
    REQUIRED_VALUES,
    biased_routing_fields,
    biased_routing_problems,
    biased_routing_rules,
)
from megagrpo.models.decoder_rules import ModelSizes, block_rules, norm_rule
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule, Size

_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class DeepseekV3(ModelFamily):
    """Latent attention (arXiv 2405.04434, section 2.1) and a router with a bias (`biased_routing`)."""

    defaults = {  # noqa: RUF012 (a constant table of the class)
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "moe_intermediate_size": 2048,
    }  # fmt: skip
    extra_values = REQUIRED_VALUES | {"rope_interleave": (True,)}
    rope_types = ("yarn",)
    example_fields = EXAMPLE_FIELDS | {"n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
    read_fields = READ_FIELDS | {"q_lora_rank", "qk_head_dim", *_LATENT}

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return routing that can't be, sizes that are missing, and keys for fewer heads than queries."""
        values = self.defaults | raw
        problems = biased_routing_problems(values)
        problems += [f"{name}: {values[name]!r}: must be above 0" for name in _LATENT if not values[name]]
        heads, groups = raw["num_attention_heads"], raw.get("num_key_value_heads")
        if groups not in (None, heads):
            problems.append(f"num_key_value_heads: {groups}: must be num_attention_heads = {heads}")
        return problems

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the fields of latent attention and of the experts."""
        raw, rope = hf.raw, hf.rope_parameters
        fields = biased_routing_fields(hf) | {
            "multi_latent_attention": True,
            "num_query_groups": hf.num_attention_heads,
            "q_lora_rank": raw["q_lora_rank"],
            "kv_lora_rank": raw["kv_lora_rank"],
            "qk_head_dim": raw["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": raw["qk_rope_head_dim"],
            "v_head_dim": raw["v_head_dim"],
            "rope_type": "rope",
            "mscale_all_dim": 0.0,
        }
        if hf.rope_type == "yarn":
            fields |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": rope["factor"],
                "original_max_position_embeddings": rope["original_max_position_embeddings"],
                "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
            }
        return fields

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the rules of all parameters. Layers for multi-token prediction, behind the others, are not
        trained: exports carry them from their source.
        """
        return block_rules(hf, biased_routing_rules(hf), _latent_attention_rules(hf))


def _latent_attention_rules(hf: HFConfig) -> list[ParameterRule]:
    sizes, raw = ModelSizes(hf), hf.raw
    layer, target = "model.layers.{layer}.self_attn.", "decoder.layers.{layer}.self_attention."
    heads, key = hf.num_attention_heads, raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    latent = Size(raw["kv_lora_rank"], "kv_lora_rank")
    queries = Size(heads * key, "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)")
    both = Size(
        heads * (raw["qk_nope_head_dim"] + raw["v_head_dim"]), "heads x (qk_nope_head_dim + v_head_dim)"
    )
    values = Size(heads * raw["v_head_dim"], "num_attention_heads x v_head_dim")
    kv_down = Size(latent + raw["qk_rope_head_dim"], "kv_lora_rank + qk_rope_head_dim")

    def linear(megatron: str, name: str, rows: int, columns: int, **more: Any) -> ParameterRule:
        return ParameterRule(
            f"{target}{megatron}.weight",
            (f"{layer}{name}.weight",),
            more.pop("kind", "column"),
            ((rows, columns),),
            is_quantized=True,
            **more,
        )

    rank = raw["q_lora_rank"]
    fused = f"{layer}fused_qkv_a_proj.weight" if rank else ""
    if rank:
        rank = Size(rank, "q_lora_rank")
        projections = [
            linear(
                "linear_q_down_proj", "q_a_proj", rank, sizes.hidden, engine=fused, is_whole_in_engine=True
            ),
            linear(
                "linear_kv_down_proj", "kv_a_proj_with_mqa", kv_down, sizes.hidden,
                engine=fused, engine_place=1, is_whole_in_engine=True,
            ),
            norm_rule(f"{target}q_layernorm.weight", f"{layer}q_a_layernorm.weight", rank),
            linear("linear_q_up_proj", "q_b_proj", queries, rank),
        ]  # fmt: skip
    else:
        projections = [
            linear("linear_q_proj", "q_proj", queries, sizes.hidden),
            linear(
                "linear_kv_down_proj", "kv_a_proj_with_mqa", kv_down, sizes.hidden, is_whole_in_engine=True
            ),
        ]
    return [
        *projections,
        norm_rule(f"{target}kv_layernorm.weight", f"{layer}kv_a_layernorm.weight", latent),
        linear("linear_kv_up_proj", "kv_b_proj", both, latent),
        linear("linear_proj", "o_proj", sizes.hidden, values, kind="row"),
    ]


FAMILIES.register("deepseek_v3")(DeepseekV3())
FAMILIES.register("kimi_k2")(DeepseekV3())
