"""Buckets in shared memory, for trainer ranks and engines of one machine: each rank copies its slices
straight to their places.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from megagrpo.weights.transports.base import SLOTS, Run, Transport, TransportContext
from megagrpo.weights.transports.mapped_file import MappedFile, slot_path
from megagrpo.wire.manifest import checksum_of


class SharedMemoryTransport(Transport):
    """A slot is a file in /dev/shm that all ranks and the engine's ranks map; nothing is gathered, packed
    or sent.
    """

    name: ClassVar[str] = "shared_memory"

    def __init__(self, context: TransportContext):
        super().__init__(context)
        self._files: dict[tuple[int, int], MappedFile] = {}

    def make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Make a file of shared memory."""
        return self._map(replica, slot, create=True)

    def attach(self) -> None:
        """Map the files of the other ranks' replicas."""
        for replica in set(self.chosen).difference(self.own_replicas):
            for slot in range(SLOTS):
                self.memory[replica, slot] = self._map(replica, slot, create=False)

    def write_slices(self, bucket: int, slot: int) -> None:
        """Copy this rank's slices. Not collective."""
        self.clear_padding(bucket, slot)
        for transfer in self.sends(bucket):
            self.put_own(bucket, slot, transfer)
            self.stats.planned_bytes += self.plan.transfer_bytes(transfer)
            self.stats.written_bytes += self.plan.transfer_bytes(transfer)

    def carry(
        self, bucket: int, slot: int, runs: Sequence[Sequence[Run]], blocks: Sequence[torch.Tensor]
    ) -> None:
        """Copy this rank's blocks. Not collective."""
        self.put_runs(slot, runs[self.rank], blocks)

    def checksums(self, bucket: int, slot: int) -> dict[tuple[int, int], str]:
        """Share the parameters out over all ranks: each can see all of them."""
        return {
            (replica, number): checksum_of(self.view(replica, slot, placed))
            for replica in self.chosen
            for number, placed in enumerate(self.layouts[bucket].tensors)
            if (replica + number) % self.context.world_size == self.rank
        }

    def location(self, replica: int, slot: int) -> dict[str, Any]:
        """Return the file's path."""
        return {"path": str(self._files[replica, slot].path)}

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.remove()
        self._files.clear()
        self.memory.clear()

    def _map(self, replica: int, slot: int, create: bool) -> torch.Tensor:
        path = slot_path(self.context.token, self.version, replica, slot)
        self._files[replica, slot] = MappedFile(path, self.slot_bytes, create)
        return self._files[replica, slot].tensor
