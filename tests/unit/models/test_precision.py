"""Precision recipes: what maps, and what a machine without the hardware says."""

import pytest
import torch

from megagrpo.errors import UserError
from megagrpo.models import precision


def test_bf16_keeps_float32_main_gradients_out_of_the_model_dtype():
    fields = precision.build_precision("bf16").transformer_config_fields()
    assert fields == {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}


@pytest.mark.parametrize("recipe", precision.FP8_RECIPES)
def test_fp8_without_its_hardware_names_what_is_missing(recipe, monkeypatch):
    monkeypatch.setattr(precision, "has_cuda", lambda: False)
    with pytest.raises(UserError, match=rf"precision.recipe: {recipe} needs a CUDA device"):
        precision.build_precision(recipe)


def test_an_emulated_recipe_needs_no_hardware_and_keeps_float32():
    built = precision.build_precision("mxfp8", emulate=True)
    assert built.params_dtype == torch.float32 and built.fp8 is None


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
def test_fp8_maps_to_the_fields_of_megatron(recipe, monkeypatch):
    """Field names and values are those of megatron-core's TransformerConfig, which validates them here."""
    monkeypatch.setattr(precision, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: object())
    built = precision.build_precision(recipe)
    fields = built.transformer_config_fields()
    assert (fields["fp8"], fields["fp8_recipe"]) == precision.FP8_RECIPES[recipe]
    assert fields["bf16"] is True
