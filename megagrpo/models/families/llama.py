"""Llama 2 and 3, SmolLM2 and other models with `model_type: llama`."""

from typing import Any

from megagrpo.models.decoder_rules import shared_rules
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule


class Llama(ModelFamily):
    """Grouped-query attention without biases, gated SiLU MLP, RMSNorm, rope."""

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return nothing: the shared fields describe this family."""
        return {}

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules."""
        return shared_rules(hf)


FAMILIES.register("llama")(Llama())
