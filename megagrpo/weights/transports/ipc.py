"""Buckets in the owner's GPU memory, opened by engine processes on the same GPUs through CUDA IPC: nothing
leaves the device.
"""

import base64
import inspect
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megagrpo.weights.transports.gathering import GatheringTransport
from megagrpo.wire.bucket_manifest import IPC_FIELDS


class IpcTransport(GatheringTransport):
    """Slices go to the owner over NCCL; a manifest carries the memory's IPC handle, as plain fields."""

    name: ClassVar[str] = "ipc"

    def _make_slot(self, replica: int, slot: int) -> torch.Tensor:
        return torch.zeros(self.context.slot_bytes, dtype=torch.uint8, device=self.context.device)

    def _location(self, slot: int, replica: int) -> dict[str, Any]:
        """Return the handle. The copies that fill the slot are done first: the engine's stream does not
        know of them.
        """
        torch.cuda.synchronize()
        memory = self._memory[replica, slot]
        uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
        return describe_handle(reduce_tensor(memory)[1], uuid)


def describe_handle(arguments: tuple[Any, ...], device_uuid: str) -> dict[str, Any]:
    """Return what torch tells of a shared CUDA tensor, uint8 [nbytes], as JSON."""
    fields = inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments
    (nbytes,) = fields["tensor_size"]
    location = {name: fields[name] for name in IPC_FIELDS}
    location |= {
        name: base64.b64encode(location[name]).decode() for name in IPC_FIELDS if name.endswith("_handle")
    }
    return {"nbytes": nbytes, "tensor_offset": fields["tensor_offset"], "device": device_uuid, **location}
