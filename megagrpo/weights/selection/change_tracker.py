"""What changed of this rank's slices since they were last published: bitwise, block by block.

The slices as they were published last are kept, in the dtype of the publish: one copy of what the rank sends.
A block is `BLOCK_ELEMENTS` neighbours of the engine's parameter (fewer at the end of a row that is cut); it
is sent whole if one bit of it differs.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from megagrpo.weights.context import PublishContext
from megagrpo.weights.plan.boxes import Box, sizes
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.wire.bucket_manifest import Patch

# a bit in the manifest stands for 64 elements: at most 1 / 1024 of bfloat16 weights' bytes
BLOCK_ELEMENTS = 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # compares bits: -0.0 is not 0.0


@dataclass(frozen=True)
class Change:
    """Blocks of one parameter of one engine rank."""

    replica: int
    destination: int
    target: int
    patch: Patch
    blocks: torch.Tensor  # [blocks that changed, length]


class ChangeTracker:
    """Remembers slices and finds the blocks that differ from them."""

    def __init__(self, context: PublishContext):
        self.context, self.reader = context, context.reader
        # the version in which all slices were last published; None: there is none
        self.version: int | None = None
        self._published: dict[tuple[str, Box], list[torch.Tensor]] = {}
        self._pending: dict[tuple[str, Box], list[torch.Tensor]] = {}

    def note(self, transfer: Transfer) -> None:
        """Keep the slices of a transfer as they are now; `commit` makes them the ones to compare with."""
        key = transfer.source, transfer.box
        if key not in self._pending:
            dtype = self.context.dtype_of(self.context.plan.sources[transfer.source])
            self._pending[key] = [
                tensor.to(dtype, copy=True).contiguous() for _, tensor in self.reader.read(transfer)
            ]

    def commit(self, version: int) -> None:
        """Take all that was noted for published."""
        self._published |= self._pending
        self._pending, self.version = {}, version

    def abort(self) -> None:
        """Forget what was noted: the next publish sends everything."""
        self._pending, self.version = {}, None

    def is_changed(self, transfer: Transfer) -> bool:
        """Return whether a transfer's slices differ from those of `version`, and note the slices."""
        self.note(transfer)
        key = transfer.source, transfer.box
        bits = _BITS[self._pending[key][0].dtype.itemsize]
        return any(
            bool((new.view(bits) != old.view(bits)).any())
            for new, old in zip(self._pending[key], self._published[key], strict=True)
        )

    def changes(self, transfer: Transfer, grid: tuple[int, ...]) -> list[Change]:
        """Return the blocks of a transfer's slices that differ from `version`, and note the slices. `grid`:
        the target's.
        """
        self.note(transfer)
        key = transfer.source, transfer.box
        found = []
        for (place, _), new, old in zip(
            self.reader.read(transfer), self._pending[key], self._published[key], strict=True
        ):
            for patch, blocks in compare(place, grid, new, old):
                found.append(Change(transfer.replica, transfer.destination, transfer.target, patch, blocks))
        return found


def compare(
    place: Box, grid: tuple[int, ...], new: torch.Tensor, old: torch.Tensor
) -> list[tuple[Patch, torch.Tensor]]:
    """Return the patches that make `old` into `new`, contiguous tensors that lie at a place of a grid,
    with the blocks that changed.
    """
    start, stride, rows, inner = strided_rows(place, grid)
    new, old = new.view(rows, inner), old.view(rows, inner)
    whole = inner // BLOCK_ELEMENTS
    parts = [(0, whole, BLOCK_ELEMENTS), (whole * BLOCK_ELEMENTS, 1, inner - whole * BLOCK_ELEMENTS)]
    found = []
    for first, blocks, length in parts:
        if not blocks * length:
            continue
        ours = new[:, first : first + blocks * length].reshape(rows, blocks, length)
        theirs = old[:, first : first + blocks * length].reshape(rows, blocks, length)
        bits = _BITS[new.dtype.itemsize]
        changed = (ours.view(bits) != theirs.view(bits)).any(-1)
        if changed.any():
            packed = np.packbits(changed.reshape(-1).cpu().numpy()).tobytes().hex()
            found.append((Patch(start + first, stride, rows, blocks, length, packed), ours[changed]))
    return found


def strided_rows(place: Box, grid: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return a box as rows in the flat tensor: (first element, elements from row to row, rows, elements of
    a row).
    """
    lengths = sizes(place)
    strides = [prod(grid[dimension + 1 :]) for dimension in range(len(grid))]
    start = sum(begin * stride for (begin, _), stride in zip(place, strides, strict=True))
    dimension = len(grid) - 1
    while dimension > 0 and lengths[dimension] == grid[dimension]:
        dimension -= 1
    inner = prod(lengths[dimension:])
    outer = [number for number in range(dimension) if lengths[number] > 1]
    assert len(outer) <= 1, f"{place} in {grid}: rows at two distances"
    return (start, strides[outer[0]], lengths[outer[0]], inner) if outer else (start, inner, 1, inner)
