"""Buckets in safetensors files of a folder that trainer and engines both reach: for engines elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from megagrpo.models.safetensors_file import safetensors_header
from megagrpo.weights.context import PublishContext
from megagrpo.weights.transports.base import SLOTS
from megagrpo.weights.transports.gathering import GatheringTransport
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry


class DiskTransport(GatheringTransport):
    """Slices go to the owner; it writes its memory to a file, which the engine maps.

    A file is written under another name first: an engine never sees a part of one.
    """

    name: ClassVar[str] = "disk"

    def __init__(self, context: PublishContext, folder: Path):
        super().__init__(context)
        self.folder = folder

    def close(self) -> None:
        """Remove the files."""
        for replica in self._own_replicas:
            for slot in range(SLOTS):
                self._file(replica, slot).unlink(missing_ok=True)
                self._file(replica, slot).with_suffix(".partial").unlink(missing_ok=True)
        super().close()

    def _make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Return plain memory; the file comes with the manifest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return torch.zeros(self.context.slot_bytes, dtype=torch.uint8)

    def _location(self, slot: int, replica: int) -> dict[str, Any]:
        return {"path": str(self._file(replica, slot).resolve())}

    def _hand_out(self, described: BucketManifest, slot: int, replica: int) -> BucketManifest:
        """Write the file; offsets count from its first byte."""
        header, entries = lay_out_safetensors(described.tensors)
        target = self._file(replica, slot)
        partial = target.with_suffix(".partial")
        memory = self._memory[replica, slot].numpy()
        with open(partial, "wb") as file:
            file.write(header)
            for entry in described.tensors:
                file.write(memory[entry.offset : entry.offset + entry.nbytes].data)
        partial.rename(target)
        return replace(described, tensors=entries)

    def _file(self, replica: int, slot: int) -> Path:
        return self.folder / f"bucket_{self.context.token}_r{replica}_{slot}.safetensors"


def lay_out_safetensors(tensors: Sequence[TensorEntry]) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """Return the head of a safetensors file of these tensors, without gaps, and the tensors with their
    offsets in it.

    A slice of one engine rank is named RANK/NAME there, since the ranks' slices share names; changes to a
    tensor are bytes.
    """
    header = safetensors_header(
        {
            entry.name if entry.rank is None else f"{entry.rank}/{entry.name}": (
                (getattr(torch, entry.dtype), entry.shape, entry.nbytes)
                if entry.patches is None
                else (torch.uint8, (entry.nbytes,), entry.nbytes)
            )
            for entry in tensors
        }
    )
    placed, position = [], len(header)
    for entry in tensors:
        placed.append(replace(entry, offset=position))
        position += entry.nbytes
    return header, tuple(placed)
