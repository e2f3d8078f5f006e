"""What the rest of the code asks about the device: where tensors live, which backend communicates, what
memory was used.
"""

import contextlib
import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch


def has_cuda() -> bool:
    """Say whether this rank computes on a CUDA device."""
    return torch.cuda.is_available()


def _quiet_imports() -> None:
    """Drop warnings that no user can act on: missing Transformer Engine and Apex on the CPU, old
    collective names inside Megatron.
    """
    if not has_cuda():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings(
        "ignore",
        category=FutureWarning,
        message=r"`torch\.distributed\.\w+` is "
        r"deprecated",
    )
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*deprecating ShardedTensor")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.")


def setup() -> torch.device:
    """Prepare this process for Megatron-core and return the rank's device. Must run before megatron.core
    is imported.
    """
    _quiet_imports()
    if has_cuda():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        from megagrpo.device import cpu

        cpu.install()
        device = cpu.CPU
    from megagrpo.device import megatron_fixes

    megatron_fixes.apply()
    return device


def backend() -> str:
    """Return the torch.distributed backend of this device; CUDA ranks keep gloo beside NCCL for CPU
    tensors.
    """
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def set_deterministic(is_on: bool) -> None:
    """Let torch use, for this whole process, only algorithms whose result is a function of their inputs;
    others raise.

    The environment of `launch.set_deterministic_environment` belongs to it on CUDA, and is read before.
    """
    torch.use_deterministic_algorithms(is_on)
    torch.backends.cudnn.benchmark = False


def megatron_region() -> AbstractContextManager:
    """Return the context manager that Megatron code runs in; it does nothing on CUDA."""
    if has_cuda():
        return contextlib.nullcontext()
    from megagrpo.device import cpu

    return cpu.region()


@contextlib.contextmanager
def background_stream() -> Iterator[None]:
    """What a thread beside the main one computes in: on CUDA the rank's device and a stream of its own, after
    what was queued so far.

    At the end all of it is done. Does nothing on the CPU, where a thread computes when it is called.
    """
    if not has_cuda():
        yield
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # the current device is that of the thread
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def peak_rss_bytes() -> int:
    """Return the largest resident set size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_bytes() -> int:
    """Return the peak of bytes allocated on the CUDA device so far, 0 on the CPU."""
    return torch.cuda.max_memory_allocated() if has_cuda() else 0
