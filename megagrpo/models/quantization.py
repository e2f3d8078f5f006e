"""Blockwise float8 checkpoints, as DeepSeek-V3 and the FP8 releases of Qwen3 are laid out, and servers that
are built for one.

Beside the weight NAME.weight of a linear layer (float8_e4m3fn [rows, columns]) lies NAME.weight_scale_inv
(float32, one for each block of 128 x 128), by which the block's elements are multiplied. Embeddings, output
layer, norms, biases and routers stay in the model's dtype.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.config.engine_sections import FP8_BLOCK
from megagrpo.models.family import CheckpointTensor

_SUFFIX = "_scale_inv"


def scale_name(name: str) -> str:
    """Return the name of a weight's scales."""
    return name + _SUFFIX


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a weight's scales, leading dimensions (of stacked experts) kept."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def quantized_shapes(tensors: Sequence[CheckpointTensor]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a quantised checkpoint's tensors, scales included."""
    shapes = {}
    for tensor in tensors:
        shapes[tensor.name] = tensor.shape
        if tensor.rule.is_quantized:
            shapes[scale_name(tensor.name)] = scale_shape(tensor.shape)
    return shapes


def find_mismatch(quantization: str, parameters: Sequence[Mapping[str, Mapping[str, Any]]]) -> str | None:
    """Return in what a server's parameters ({name: {"dtype", "shape"}} by engine rank) differ from
    `engine.server.quantization`; None: nothing.
    """
    float8 = [name for owned in parameters for name, one in owned.items() if one["dtype"] == "float8_e4m3fn"]
    scales = [name for owned in parameters for name in owned if name.endswith(_SUFFIX)]
    if quantization == "none":
        return f"{float8[0]} is float8" if float8 else None
    return None if float8 and scales else "the model has no float8 weights with scales of blocks"


def quantization_config(tensors: Sequence[CheckpointTensor]) -> dict[str, Any]:
    """Return what `config.json` of a quantised checkpoint says under "quantization_config".

    Args:
        tensors: the checkpoint's; linear layers among them that are not quantised (routers, the output layer)
            are named there.
    """
    unquantized = [
        tensor.name.removesuffix(".weight")
        for tensor in tensors
        if len(tensor.shape) == 2 and not tensor.rule.is_quantized and tensor.rule.section != "embedding"
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": unquantized,
    }
