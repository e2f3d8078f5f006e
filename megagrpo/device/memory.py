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


class PeakMemory:
    """The largest memory that tensors took on the device, of each phase and of the run. The CPU has none:
    there the allocator counts nothing.

    A phase may run inside another; what it takes is the outer one's too.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}
        self._largest = 0

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._read()
        self._open.append(phase)

    def leave(self, phase: str, seconds: float) -> None:
        """End a phase, which took `seconds`."""
        self._read()
        self._open.remove(phase)

    @property
    def largest_bytes(self) -> int:
        """The largest of the run so far; 0 on the CPU."""
        self._read()
        return self._largest

    def take(self) -> dict[str, int]:
        """Return the bytes of each phase since the last call, and start again."""
        self._read()
        taken, self._peaks = self._peaks, {}
        return taken

    def _read(self) -> None:
        if not has_cuda():
            return
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._largest = max(self._largest, peak)
        for phase in self._open:
            self._peaks[phase] = max(self._peaks.get(phase, 0), peak)
