"""GPU memory that trainer and engine share: how much an engine can take, and how the trainer frees memory."""

import gc

import torch

from megagrpo.device.device import has_cuda


def return_cached_memory() -> None:
    """Free the memory that torch's allocator holds for later use. Does nothing on the CPU.

    After an update that is the peak of the activations, tens of GB that an engine which wakes cannot have.
    """
    if has_cuda():
        gc.collect()
        torch.cuda.empty_cache()


def share_of_device_memory(fraction_of_free: float) -> float:
    """Return what `fraction_of_free` of the memory that is free now is as a fraction of all of this GPU's.

    Rounded down: an engine that is to have more than is free does not start.
    """
    return_cached_memory()
    free, total = torch.cuda.mem_get_info()
    return int(1000 * fraction_of_free * free / total) / 1000
