"""GLM-4.5 and GLM-4.6 (`model_type: glm4_moe`)."""

from typing import Any

from megagrpo.models.biased_routing import (
    EXAMPLE_FIELDS,
    READ_FIELDS,
    REQUIRED_VALUES,
    biased_routing_fields,
    biased_routing_problems,
    biased_routing_rules,
)
from megagrpo.models.decoder_rules import ModelSizes, attention_rules, block_rules, qkv_rule
from megagrpo.models.families.qwen3 import head_norm_rules
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule


class Glm4Moe(ModelFamily):
    """Half of each head rotated, biases and norms in the attention by choice, a router with a bias."""

    defaults = {  # noqa: RUF012 (a constant table of the class)
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False,
        "use_qk_norm": False, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 1408,
    }  # fmt: skip
    extra_values = REQUIRED_VALUES
    example_fields = EXAMPLE_FIELDS | {"attention_bias": True, "use_qk_norm": True}
    read_fields = READ_FIELDS | {"partial_rotary_factor", "attention_bias", "use_qk_norm"}

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return routing that can't be."""
        return biased_routing_problems(self.defaults | raw)

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the switches of the attention and the fields of the experts."""
        return biased_routing_fields(hf) | {
            "add_qkv_bias": hf.raw["attention_bias"],
            "qk_layernorm": hf.raw["use_qk_norm"],
        }

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the rules of all parameters."""
        sizes = ModelSizes(hf)
        attention = attention_rules(sizes)
        attention += [qkv_rule(True, sizes)] if hf.raw["attention_bias"] else []
        attention += head_norm_rules(hf) if hf.raw["use_qk_norm"] else []
        return block_rules(hf, biased_routing_rules(hf), attention)


FAMILIES.register("glm4_moe")(Glm4Moe())
