"""`precision.recipe` as fields of Megatron's TransformerConfig and OptimizerConfig."""

import importlib.util
from dataclasses import dataclass

import torch

from megagrpo.device.device import has_cuda
from megagrpo.errors import UserError

# Megatron's fp8_recipe names (TransformerConfig.fp8_recipe); e4m3 forward and e5m2 gradients where `hybrid`.
FP8_RECIPES = {
    "fp8_delayed": ("hybrid", "delayed"),
    "fp8_tensorwise": ("hybrid", "tensorwise"),
    "fp8_blockwise": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}
MINIMUM_CAPABILITY = {
    "fp8_delayed": (8, 9),
    "fp8_tensorwise": (8, 9),
    "fp8_blockwise": (9, 0),
    "mxfp8": (10, 0),
}


@dataclass(frozen=True)
class Precision:
    """Number formats of a model. Main parameters, gradients and optimizer states are float32 in every
    recipe.
    """

    params_dtype: torch.dtype
    fp8: str | None = None
    fp8_recipe: str | None = None

    @property
    def is_bf16(self) -> bool:
        """Say whether parameters and activations are bfloat16."""
        return self.params_dtype == torch.bfloat16

    def transformer_config_fields(self) -> dict:
        """Return the TransformerConfig fields of this recipe."""
        fields: dict = {
            "params_dtype": self.params_dtype,
            "pipeline_dtype": self.params_dtype,
            "bf16": self.is_bf16,
        }
        if self.fp8:
            fields |= {"fp8": self.fp8, "fp8_recipe": self.fp8_recipe}
        return fields


def build_precision(recipe: str, emulate: bool = False) -> Precision:
    """Return the number formats of a recipe; float32 where linear layers emulate it (`emulation.py`).

    Raises:
        UserError: an FP8 recipe where CUDA, Transformer Engine or the GPU's FP8 support is missing.
    """
    if emulate:
        return Precision(torch.float32)
    if recipe in ("fp32", "bf16"):
        return Precision(torch.float32 if recipe == "fp32" else torch.bfloat16)
    missing = []
    if not has_cuda():
        missing.append("a CUDA device")
    elif torch.cuda.get_device_capability() < MINIMUM_CAPABILITY[recipe]:
        needed = ".".join(map(str, MINIMUM_CAPABILITY[recipe]))
        missing.append(f"a GPU of compute capability {needed} or later")
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("the package transformer-engine (extra `te`)")
    if missing:
        raise UserError(f"precision.recipe: {recipe} needs {' and '.join(missing)}; use fp32 or bf16")
    fp8, fp8_recipe = FP8_RECIPES[recipe]
    return Precision(torch.bfloat16, fp8, fp8_recipe)
