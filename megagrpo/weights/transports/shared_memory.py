"""Buckets in shared memory, for trainer ranks and engines of one machine: each rank copies its slices
straight to their places.
"""

import mmap
import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from megagrpo.supervision.orphaned_files import hold
from megagrpo.weights.context import PublishContext
from megagrpo.weights.selection.base import SelectedBlocks, SelectedBucket
from megagrpo.weights.transports.base import SLOTS
from megagrpo.weights.transports.slots import SlotTransport
from megagrpo.wire.bucket_manifest import checksum_of
from megagrpo.wire.shared_files import PREFIX, SHARED_MEMORY


class SharedMemoryTransport(SlotTransport):
    """A slot is a file in /dev/shm that all ranks and the engine's ranks map; nothing is gathered, packed
    or sent.
    """

    name: ClassVar[str] = "shared_memory"

    def __init__(self, context: PublishContext):
        super().__init__(context)
        self._files: dict[tuple[int, int], MappedFile] = {}

    def attach(self) -> None:
        """Map the files of the other ranks' replicas."""
        for replica in set(self.chosen).difference(self._own_replicas):
            for slot in range(SLOTS):
                self._memory[replica, slot] = self._map(replica, slot, create=False)

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.remove()
        self._files.clear()
        super().close()

    def _make_slot(self, replica: int, slot: int) -> torch.Tensor:
        return self._map(replica, slot, create=True)

    def _write_slices(self, bucket: SelectedBucket, slot: int) -> None:
        """Copy this rank's slices. Not collective."""
        self._clear_padding(bucket.number, slot)
        for transfer in bucket.sends:
            self._put_own(bucket.number, slot, transfer)

    def _write_blocks(self, blocks: SelectedBlocks, slot: int) -> None:
        """Copy this rank's blocks. Not collective."""
        self._put_runs(slot, blocks.runs[self.rank], blocks.blocks)

    def _checksums(self, bucket: SelectedBucket, slot: int) -> dict[tuple[int, int], str]:
        """Share the parameters out over all ranks: each can see all of them."""
        return {
            (replica, number): checksum_of(self._view(replica, slot, placed))
            for replica in self.chosen
            for number, placed in enumerate(self.context.layouts[bucket.number].tensors)
            if (replica + number) % self.context.world_size == self.rank
        }

    def _location(self, slot: int, replica: int) -> dict[str, Any]:
        return {"path": str(self._files[replica, slot].path)}

    def _map(self, replica: int, slot: int, create: bool) -> torch.Tensor:
        path = slot_path(self.context.token, self.version, replica, slot)
        self._files[replica, slot] = MappedFile(path, self.context.slot_bytes, create)
        return self._files[replica, slot].tensor


def slot_path(token: str, version: int, replica: int, slot: int) -> Path:
    """Return the name of a slot in shared memory; no two runs, versions or replicas share one."""
    return SHARED_MEMORY / f"{PREFIX}{token}_v{version}_r{replica}_{slot}"


class MappedFile:
    """A file whose bytes are a tensor; what one process writes the others see. The creator removes it."""

    def __init__(self, path: Path, nbytes: int, create: bool):
        """Make the file (room for all of it is taken now: later there would be a SIGBUS), or map one that is
        there.

        Raises:
            OSError: no room, or no such file.
        """
        self.path, self._created = path, create
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                hold(handle)
                os.posix_fallocate(handle, 0, nbytes)
            self._mapped = mmap.mmap(handle, nbytes)
        except OSError as error:
            if create:
                path.unlink()
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)} ({nbytes} bytes)", str(path)
            ) from None
        finally:
            os.close(handle)
        self.tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def remove(self) -> None:
        """Remove the file, if this process made it; its memory goes with the last tensor that maps it."""
        if self._created:
            self.path.unlink(missing_ok=True)
