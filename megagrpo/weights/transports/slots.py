"""The part that all transports with buckets in memory share: slots, where every parameter has its place."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from megagrpo.weights.context import PublishContext
from megagrpo.weights.plan.boxes import Box, slices
from megagrpo.weights.plan.bucket_layout import PlacedTensor
from megagrpo.weights.plan.publish_plan import Transfer
from megagrpo.weights.selection.base import SelectedBlocks, SelectedBucket, SlotRun
from megagrpo.weights.transports.base import SLOTS, Transport
from megagrpo.wire.bucket_manifest import checksum_of


class SlotTransport(Transport):
    """A transport with two slots for every replica. They exist during a publish only; a subclass says where
    they are and how slices get there.
    """

    def __init__(self, context: PublishContext):
        super().__init__(context)
        # (replica, slot) -> bytes [slot_bytes], of those that this rank can reach
        self._memory: dict[tuple[int, int], torch.Tensor] = {}

    def open(self, version: int, replicas: Sequence[int]) -> None:
        """Begin a publish: make the slots of the replicas that this rank owns."""
        super().open(version, replicas)
        for replica in self._own_replicas:
            for slot in range(SLOTS):
                self._memory[replica, slot] = self._make_slot(replica, slot)
        self._note_peak()

    def close(self) -> None:
        """Give the slots back."""
        self._memory.clear()

    @abstractmethod
    def _make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Return memory [slot_bytes] of bytes, zeros."""

    @abstractmethod
    def _write_slices(self, bucket: SelectedBucket, slot: int) -> None:
        """Bring slices to their places. Collective over all ranks."""

    @abstractmethod
    def _write_blocks(self, blocks: SelectedBlocks, slot: int) -> None:
        """Bring blocks to their places. Collective over all ranks."""

    def _write(self, bucket: SelectedBucket, slot: int) -> SelectedBucket:
        if bucket.blocks is not None:
            self._write_blocks(bucket.blocks, slot)
            return bucket.without_blocks()
        try:
            self.context.reader.prepare(self.plan.buckets[bucket.number])
            self._write_slices(bucket, slot)
        finally:
            self.context.reader.forget()  # its copies are of the weights of this version
        return bucket

    def _checksums(self, bucket: SelectedBucket, slot: int) -> dict[tuple[int, int], str]:
        return {
            (replica, number): checksum_of(self._view(replica, slot, placed).cpu())
            for replica in self._own_replicas
            for number, placed in enumerate(self.context.layouts[bucket.number].tensors)
        }

    def _view(self, replica: int, slot: int, placed: PlacedTensor) -> torch.Tensor:
        """Return a parameter's memory, in the grid in which its parts are placed."""
        raw = self._memory[replica, slot][placed.offset : placed.offset + placed.nbytes]
        return raw.view(self.context.dtype_of(placed.target)).view(placed.target.grid)

    def _put(self, bucket: int, slot: int, transfer: Transfer, place: Box, tensor: torch.Tensor) -> None:
        """Copy a slice to its place, in the dtype of the publish."""
        placed = self.context.layouts[bucket].find(transfer.destination, transfer.target)
        self._view(transfer.replica, slot, placed)[slices(place)].copy_(tensor)

    def _put_own(self, bucket: int, slot: int, transfer: Transfer) -> None:
        """Copy this rank's slices of a transfer straight from the weights to their places."""
        for place, tensor in self.context.reader.read(transfer):
            self._put(bucket, slot, transfer, place, tensor)

    def _put_runs(self, slot: int, runs: Sequence[SlotRun], blocks: Sequence[torch.Tensor]) -> None:
        """Copy blocks to their places."""
        for run, tensor in zip(runs, blocks, strict=True):
            self._memory[run.replica, slot][run.offset : run.offset + run.nbytes].copy_(
                tensor.reshape(-1).view(torch.uint8)
            )

    def _clear_padding(self, bucket: int, slot: int) -> None:
        """Zero the rows that nobody sends in the slots that this rank owns."""
        for placed in self.context.layouts[bucket].tensors:
            if rows := placed.padding_rows:
                for replica in self._own_replicas:
                    self._view(replica, slot, placed)[-rows:].zero_()

    def _note_peak(self, message_bytes: int = 0) -> None:
        """Count the memory of this rank's own slots and of messages on their way."""
        own = sum(
            memory.nbytes for (replica, _), memory in self._memory.items() if replica in self._own_replicas
        )
        self.stats.peak_bytes = max(self.stats.peak_bytes, own + message_bytes)
