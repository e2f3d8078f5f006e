"""Buckets in the owner's GPU memory, opened by engine processes on the same GPUs through CUDA IPC: nothing leaves the device."""

import base64
import pickle
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import reduce_tensor

from megagrpo.weights.transports.group import GroupTransport


class IpcTransport(GroupTransport):
    """Slices go to the owner over NCCL; a manifest carries the memory's IPC handle.

    The handle is what torch pickles of a CUDA tensor: (function, arguments), to be called in an engine process on a GPU that is, or
    reaches, the owner's.
    """

    name: ClassVar[str] = "ipc"

    @property
    def manifest_transport(self) -> str:
        """The engine opens the handle."""
        return self.name

    def make_slot(self, replica: int, slot: int) -> torch.Tensor:
        """Return device memory."""
        device = next(iter(self.context.reader.model.chunks[0].parameters())).device
        return torch.zeros(self.slot_bytes, dtype=torch.uint8, device=device)

    def location(self, replica: int, slot: int) -> dict[str, Any]:
        """Return the handle as text."""
        return {"handle": base64.b64encode(pickle.dumps(reduce_tensor(self.memory[replica, slot]))).decode()}
