"""Qwen3 dense models (`model_type: qwen3`)."""

from typing import Any

from megagrpo.models.decoder_rules import ModelSizes, norm_rule, shared_rules
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule


class Qwen3(ModelFamily):
    """Llama with an RMSNorm on each query and key head, and a head size of its own."""

    defaults = {"num_key_value_heads": 32, "head_dim": 128}  # noqa: RUF012 (a constant table of the class)

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the query/key norm switch."""
        return {"qk_layernorm": True}

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules and those of the query and key norms."""
        return [*shared_rules(hf), *head_norm_rules(hf)]


def head_norm_rules(hf: HFConfig) -> list[ParameterRule]:
    """Return the rules of the norms on each query and key head."""
    return [
        norm_rule(
            f"decoder.layers.{{layer}}.self_attention.{name}_layernorm.weight",
            f"model.layers.{{layer}}.self_attn.{name}_norm.weight",
            ModelSizes(hf).head,
        )
        for name in "qk"
    ]


FAMILIES.register("qwen3")(Qwen3())
