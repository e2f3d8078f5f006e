"""Read a GGUF file: its metadata and its tensors as float32 arrays.

Format: github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3, little-endian); block layouts: ggml's
`ggml-common.h`. A quantised row is a series of blocks of 32 weights, each with a float16 scale d (and minimum
m), low nibbles first:

    Q4_0: d, 16 bytes     w = d * (q - 8)          Q8_0: d, 32 int8     w = d * q
    Q4_1: d, m, 16 bytes  w = d * q + m            F32, F16: as they are
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megagrpo.errors import UserError

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_BLOCK = 32  # weights per quantised block


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]  # row-major; the file lists the fastest axis first
    type_id: int
    offset: int  # bytes from the start of the file


class GgufFile:
    """A GGUF file, memory-mapped: opening it reads the metadata alone.

    Example:
        >>> file = GgufFile("model.gguf")  # doctest: +SKIP
        >>> file.metadata["general.architecture"], dict(file.tensors())["output_norm.weight"].shape  #
        doctest: +SKIP
    """

    def __init__(self, path: str | Path):
        """Read the header; raises UserError where the file is no GGUF file, is cut short, or has a tensor
        type that is not supported.
        """
        self.path = Path(path)
        if not self.path.is_file() or self.path.stat().st_size < 24:
            raise UserError(f"{path}: no GGUF file (missing, or shorter than a header)")
        self._bytes = np.memmap(self.path, np.uint8, "r")
        reader = _Reader(self._bytes, self.path)
        if reader.take(4).tobytes() != b"GGUF":
            raise UserError(f"{path}: no GGUF file (it begins with other bytes)")
        version = reader.scalar("<u4")
        if version not in (2, 3):
            raise UserError(f"{path}: GGUF version {version}; 2 and 3 can be read")
        tensor_count, key_count = reader.scalar("<u8"), reader.scalar("<u8")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.string()
            self.metadata[key] = reader.value(reader.scalar("<u4"))
        entries = [reader.tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        data = -(-reader.position // alignment) * alignment
        self.stored = tuple(StoredTensor(t.name, t.shape, t.type_id, data + t.offset) for t in entries)
        for tensor in self.stored:
            self._check(tensor)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, float32 array) in the order of the file; one tensor is in memory at a time."""
        for tensor in self.stored:
            dtype = _TYPES[tensor.type_id]
            stored = self._bytes[tensor.offset : tensor.offset + dtype.stored_bytes(tensor)]
            yield (
                tensor.name,
                dtype.dequantize(np.asarray(stored).reshape(-1, dtype.block_bytes)).reshape(tensor.shape),
            )

    def _check(self, tensor: StoredTensor) -> None:
        if tensor.type_id not in _TYPES:
            known = ", ".join(dtype.name for dtype in _TYPES.values())
            raise UserError(
                f"{self.path}: tensor {tensor.name!r} has GGUF type {tensor.type_id}; supported: {known}"
            )
        end = tensor.offset + _TYPES[tensor.type_id].stored_bytes(tensor)
        if end > len(self._bytes):
            raise UserError(
                f"{self.path}: tensor {tensor.name!r} ends at byte {end}, the file at "
                f"{len(self._bytes)}: it is cut short"
            )


class _Reader:
    """A position in the header."""

    def __init__(self, source: np.ndarray, path: Path):
        self._source, self._path = source, path
        self.position = 0

    def take(self, count: int) -> np.ndarray:
        if self.position + count > len(self._source):
            raise UserError(
                f"{self._path}: the header ends at byte {len(self._source)}: the file is cut short"
            )
        taken = self._source[self.position : self.position + count]
        self.position += count
        return taken

    def scalar(self, dtype: str) -> Any:
        return self.array(dtype, 1)[0]

    def array(self, dtype: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize).tobytes(), dtype).tolist()

    def string(self) -> str:
        return self.take(self.scalar("<u8")).tobytes().decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            element, count = self.scalar("<u4"), self.scalar("<u8")
            return (
                self.array(_SCALARS[element], count)
                if element in _SCALARS
                else [self.value(element) for _ in range(count)]
            )
        if type_id not in _SCALARS:
            raise UserError(f"{self._path}: metadata value of unknown type {type_id}")
        return self.scalar(_SCALARS[type_id])

    def tensor_entry(self) -> StoredTensor:
        name, dimensions = self.string(), self.scalar("<u4")
        shape = tuple(self.array("<u8", dimensions))[::-1]
        return StoredTensor(name, shape, self.scalar("<u4"), self.scalar("<u8"))


@dataclass(frozen=True)
class _TensorType:
    name: str
    block_weights: int
    block_bytes: int
    # uint8 [blocks, block_bytes] -> float32 [blocks, block_weights]
    dequantize: Callable[[np.ndarray], np.ndarray]

    def stored_bytes(self, tensor: StoredTensor) -> int:
        return int(np.prod(tensor.shape, dtype=np.int64)) // self.block_weights * self.block_bytes


def _half(blocks: np.ndarray, begin: int) -> np.ndarray:
    """Return the float16 at byte `begin` of each block as float32 [blocks, 1]."""
    return blocks[:, begin : begin + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return float32 [blocks, 32]: the low four bits of 16 bytes, then their high four bits."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


_TYPES = {
    0: _TensorType("F32", 1, 4, lambda blocks: blocks.view("<f4").astype(np.float32)),
    1: _TensorType("F16", 1, 2, lambda blocks: blocks.view("<f2").astype(np.float32)),
    2: _TensorType("Q4_0", _BLOCK, 18, lambda blocks: _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)),
    3: _TensorType(
        "Q4_1", _BLOCK, 20, lambda blocks: _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)
    ),
    8: _TensorType(
        "Q8_0", _BLOCK, 34, lambda blocks: _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)
    ),
}
