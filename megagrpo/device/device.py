"""Answers all questions about the device: where tensors live, which backend communicates, what memory was
used.
"""

import contextlib
import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from megagrpo.errors import UserError

# `addmm.dtype_out` with a float32 `self` (ops/matmul.py): earlier ones want operands of one type
MINIMUM_CUDA_TORCH = (2, 10)


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


def _check_cuda() -> None:
    """Refuse, in one line, what NCCL or the first backward would fail at much later."""
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > devices:
        raise UserError(
            f"{ranks} ranks on this host, but it has {devices} GPU{'s' * (devices != 1)}, and NCCL "
            f"wants one for each rank: start at most {devices} with --nproc-per-node, or hide the GPUs "
            '(CUDA_VISIBLE_DEVICES="") to run on the CPU'
        )
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < MINIMUM_CUDA_TORCH:
        raise UserError(
            f"torch {torch.__version__}: GPUs need {'.'.join(map(str, MINIMUM_CUDA_TORCH))} or later, whose "
            "GEMMs add bfloat16 products to float32"
        )


def _cuda_device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def setup() -> torch.device:
    """Prepare this process for Megatron-core and return the rank's device. Must run before megatron.core
    is imported.

    Raises:
        UserError: this host has fewer GPUs than ranks, or torch is too old for a GPU.
    """
    _quiet_imports()
    if has_cuda():
        _check_cuda()
        device = _cuda_device()
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


def process_group_device() -> torch.device | None:
    """Return the device whose communicator is to be made with the process group; None: with its first use.

    NCCL makes a group's communicator in the first collective of all its ranks. Batched sends that only some
    of them take part in, which is what a publish starts with, would wait for the others for ever.
    """
    return _cuda_device() if has_cuda() else None


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
    torch.cuda.set_device(_cuda_device())  # the current device is that of the thread
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def finish_queued_work() -> None:
    """Wait until the rank's device has finished all work that this thread queued on it; the CPU queues
    nothing.

    Other streams go on: rollouts that a background thread generates are not waited for.
    """
    if has_cuda():
        torch.cuda.current_stream().synchronize()


def peak_rss_bytes() -> int:
    """Return the largest resident set size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
