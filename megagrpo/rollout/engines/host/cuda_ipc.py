"""Opens buckets that lie in a trainer rank's GPU memory, through CUDA's handles between processes. Standard library and torch only.

The handle is what torch pickles of a CUDA tensor: a function and its arguments. Nothing but that function is ever unpickled.
"""

import base64
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

try:  # in an engine's process this folder is on the path; in the trainer's it is a package
    from manifest import BucketManifest, ManifestError, check_tensor
except ImportError:
    from megagrpo.rollout.engines.host.manifest import BucketManifest, ManifestError, check_tensor

_STORAGE_DEVICE = 6  # place of the device's index among the arguments of rebuild_cuda_tensor
_ALLOWED = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): rebuild_cuda_tensor,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
}


def open_device_tensors(manifest: BucketManifest, rank: int, device_index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of what engine rank `rank` loads: views of the sender's memory, each checked before it is handed out.

    Args:
        device_index: under which this process sees the sender's GPU.

    Raises:
        ManifestError: the handle can't be opened, or a tensor is not what the manifest says.
    """
    try:
        function, arguments = read_handle(manifest.location["handle"])
        arguments[_STORAGE_DEVICE] = device_index
        memory = function(*arguments)
    except ManifestError:
        raise
    except Exception as error:  # whatever torch and CUDA raise for a handle that is no longer, or not here
        raise ManifestError(f"bucket of version {manifest.version}: handle: {type(error).__name__}: {error}") from None
    yield from cut(memory, manifest, rank)


def cut(memory: torch.Tensor, manifest: BucketManifest, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of engine rank `rank` in `memory`, uint8 [bytes]. Raises ManifestError as `open_device_tensors` does."""
    for entry in manifest.entries_for(rank):
        if not 0 <= entry.offset <= memory.numel() - entry.nbytes:
            raise ManifestError(f"weight {entry.name!r}: {entry.nbytes} bytes at {entry.offset} of a bucket of {memory.numel()}")
        flat = memory[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype)
        if flat.numel() != torch.Size(entry.shape).numel():
            raise ManifestError(f"weight {entry.name!r}: {list(entry.shape)} {entry.dtype} is not {entry.nbytes} bytes")
        tensor = flat.reshape(entry.shape)
        check_tensor(entry, tensor.cpu())
        yield entry.name, tensor


def read_handle(text: str) -> tuple[Any, list[Any]]:
    """Return (function, arguments) of a handle. Raises ManifestError if it holds anything else."""
    function, arguments = _HandleReader(io.BytesIO(base64.b64decode(text))).load()
    if function is not rebuild_cuda_tensor:
        raise ManifestError("bucket handle: it is not that of a CUDA tensor")
    return function, list(arguments)


class _HandleReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise ManifestError(f"bucket handle: {module}.{name} is not part of one")
        return _ALLOWED[module, name]
