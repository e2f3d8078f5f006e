"""Qwen2 and Qwen2.5 (`model_type: qwen2`)."""

from typing import Any

from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily, shared_rules
from megagrpo.models.rules import ParameterRule


class Qwen2(ModelFamily):
    """Llama with biases on the query, key and value projections."""

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the QKV bias switch."""
        return {"add_qkv_bias": True}

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules and that of the QKV bias."""
        names = tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.bias" for name in "qkv")
        return [
            *shared_rules(hf),
            ParameterRule("decoder.layers.{layer}.self_attention.linear_qkv.bias", names, "qkv"),
        ]


FAMILIES.register("qwen2")(Qwen2())
