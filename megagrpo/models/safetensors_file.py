"""Writes the safetensors format: eight bytes with the length of the header, the header (JSON, filled up with
spaces), the tensors one after another.

Files are written by whoever calls: plainly, with checksums, or in place of shared memory. They get the modes
that the user's umask gives; the library's own writer makes them private.
"""

import json
from collections.abc import Mapping, Sequence

import torch

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_ALIGNMENT = 64  # bytes before the first tensor: whole cache lines, and any dtype


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int], int]]) -> bytes:
    """Return all that comes before the tensors.

    Args:
        tensors: (dtype, shape, bytes) by name, in the order in which they follow without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        place = [offset, offset + nbytes]
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": place}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def safetensors_parts(tensors: Mapping[str, torch.Tensor]) -> Sequence[memoryview | bytes]:
    """Return the parts of a file of contiguous host tensors, whose memory is not copied."""
    header = safetensors_header({name: (one.dtype, one.shape, one.nbytes) for name, one in tensors.items()})
    return [header, *(tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values())]


def safetensors_names(count: int) -> list[str]:
    """Return the names of a folder's files, as the Hugging Face hub has them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def safetensors_index(file_of: Mapping[str, str], total_bytes: int) -> bytes:
    """Return the index of a folder of several files.

    Args:
        file_of: the file's name, by tensor.
        total_bytes: of all tensors.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
    return json.dumps(index, indent=2).encode()
