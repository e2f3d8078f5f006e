"""A model family of your own: an architecture for the `model_type` of a folder's config.json.

    model:
      path: ByteDance-Seed/Seed-OSS-36B-Instruct          # a folder with model_type: seed_oss
      family: examples/custom_family.py:SeedOss           # FILE.py:class

    megagrpo check-extension examples/custom_family.py:SeedOss
    python tools/convert_hf_to_megatron.py SOURCE TARGET model.family=examples/custom_family.py:SeedOss

A family says three things. Which fields of config.json it reads, and which values of others it computes: all
else is refused, since it could change the forward pass. Which fields of Megatron's TransformerConfig it sets
beside the shared ones. And one rule for each Megatron parameter: the HF tensors that it is made of, their
shapes and split, what engines fuse them into (megagrpo/models/rules.py; megagrpo/models/decoder_rules.py has
those that decoders share). Import, export, publishing, checkpoints and conversions follow from the rules.
"""

from typing import Any

from megagrpo.models.decoder_rules import ModelSizes, qkv_rule, shared_rules
from megagrpo.models.family import HFConfig, ModelFamily
from megagrpo.models.rules import ParameterRule


class SeedOss(ModelFamily):
    """ByteDance's Seed-OSS: Llama with biases on the query, key and value projections."""

    # what transformers takes where config.json lacks a field
    defaults = {  # noqa: RUF012 (a constant table of the class)
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
    }  # fmt: skip
    # what pretraining dropped; no log-prob depends on it
    read_fields = frozenset({"attention_bias", "attention_dropout", "residual_dropout"})
    # other values would need other rules
    extra_values = {"attention_out_bias": (False,)}  # noqa: RUF012 (a constant table of the class)

    def transformer_config_fields(self, hf: HFConfig) -> dict[str, Any]:
        """Return the switch of the biases."""
        return {"add_qkv_bias": hf.raw["attention_bias"]}

    def parameter_rules(self, hf: HFConfig) -> list[ParameterRule]:
        """Return the shared rules and that of the biases."""
        biases = [qkv_rule(True, ModelSizes(hf))] if hf.raw["attention_bias"] else []
        return [*shared_rules(hf), *biases]
