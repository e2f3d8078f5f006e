"""Tools are scripts: their folder is on the path only while one runs, or here."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "tools"))

UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5  # GGUF's metadata value types


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value) -> bytes:
    """One metadata value with its type, by docs/gguf.md."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", ARRAY, INT32, len(value)) + struct.pack(f"<{len(value)}i", *value)


@pytest.fixture
def write_gguf(tmp_path):
    """Return a writer of GGUF 3 files: metadata, and tensors as (row-major shape, type id, raw bytes) or
    float32 arrays.
    """

    def write(metadata: dict, tensors: dict, version: int = 3) -> Path:
        entries, data = b"", b""
        for name, tensor in tensors.items():
            shape, type_id, raw = (
                (tensor.shape, 0, tensor.astype("<f4").tobytes())
                if isinstance(tensor, np.ndarray)
                else tensor
            )
            data += b"\0" * (-len(data) % 32)
            entries += _string(name) + struct.pack(
                f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_id, len(data)
            )
            data += raw
        head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
        head += b"".join(_string(key) + _value(value) for key, value in metadata.items()) + entries
        path = tmp_path / "model.gguf"
        path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
        return path

    return write
