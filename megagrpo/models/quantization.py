"""Blockwise float8 checkpoints, as DeepSeek-V3 and the FP8 releases of Qwen3 are laid out, and servers that
are built for one.

Beside the weight NAME.weight of a linear layer (float8_e4m3fn [rows, columns]) lies NAME.weight_scale_inv
(float32, one for each block of 128 x 128), by which the block's elements are multiplied. Embeddings, output
layer, norms, biases and routers stay in the model's dtype.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megagrpo.config.schema import FP8_BLOCK

_SUFFIX = "_scale_inv"


def is_quantized(name: str) -> bool:
    """Say whether an HF tensor is the weight of a linear layer or of an expert: all projections of our
    families are called so.
    """
    return name.endswith("_proj.weight")


def scale_name(name: str) -> str:
    """Return the name of a weight's scales."""
    return name + _SUFFIX


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a weight's scales, leading dimensions (of stacked experts) kept."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def with_scales(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the names and shapes of a checkpoint's tensors, with those of the scales that it has when it
    is quantised.
    """
    for name, shape in shapes.items():
        yield name, shape
        if is_quantized(name):
            yield scale_name(name), scale_shape(shape)


def find_mismatch(quantization: str, parameters: Sequence[Mapping[str, Mapping[str, Any]]]) -> str | None:
    """Return in what a server's parameters ({name: {"dtype", "shape"}} by engine rank) differ from
    `engine.quantization`; None: nothing.
    """
    float8 = [name for owned in parameters for name, one in owned.items() if one["dtype"] == "float8_e4m3fn"]
    scales = [name for owned in parameters for name in owned if name.endswith(_SUFFIX)]
    if quantization == "none":
        return f"{float8[0]} is float8" if float8 else None
    return None if float8 and scales else "the model has no float8 weights with scales of blocks"


def quantization_config(names: Sequence[str]) -> dict[str, Any]:
    """Return what `config.json` of a quantised checkpoint says under "quantization_config".

    Args:
        names: of the checkpoint's tensors; routers and the output layer are linear layers that are not
            quantised.
    """
    unquantized = [
        name.removesuffix(".weight") for name in names if name.endswith((".gate.weight", "lm_head.weight"))
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": unquantized,
    }
