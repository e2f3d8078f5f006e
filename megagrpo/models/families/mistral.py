"""Mistral (`model_type: mistral`)."""

from typing import Any

from megagrpo.models.decoder_rules import shared_rules
from megagrpo.models.family import FAMILIES, HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule


class Mistral(ModelFamily):
    """Llama whose tokens may see a sliding window of the last tokens alone."""

    defaults = {"num_key_value_heads": 8, "sliding_window": 4096}  # noqa: RUF012 (a constant table of the class)

    def check(self, raw: dict[str, Any]) -> list[str]:
        """Return a window that holds no token."""
        window = raw.get("sliding_window")
        if window is None or (isinstance(window, int) and not isinstance(window, bool) and window > 0):
            return []
        return [f"sliding_window: {window!r}: must be null or a whole number above 0"]

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the window: Megatron counts the tokens before a token's own."""
        window = hf.raw["sliding_window"]
        return {} if window is None else {"window_size": (window - 1, 0)}

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules."""
        return shared_rules(hf)


FAMILIES.register("mistral")(Mistral())
