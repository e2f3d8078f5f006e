"""Qwen2 and Qwen2.5 (`model_type: qwen2`)."""

from typing import Any

from megagrpo.models.decoder_rules import ModelSizes, qkv_rule, shared_rules
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule


class Qwen2(ModelFamily):
    """Llama with biases on the query, key and value projections."""

    defaults = {"num_key_value_heads": 32}  # noqa: RUF012 (a constant table of the class)

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the QKV bias switch."""
        return {"add_qkv_bias": True}

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules and that of the QKV bias."""
        return [*shared_rules(hf), qkv_rule(True, ModelSizes(hf))]


FAMILIES.register("qwen2")(Qwen2())
