"""What this machine can run, found out without importing torch: checks come before it is loaded."""

import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """The facts that a configuration can depend on."""

    torch_cuda: str | None  # CUDA version that torch was built for; None: a CPU build
    nvidia_device: bool
    transformer_engine: bool
    shared_memory_bytes: int | None = None  # free in /dev/shm; None: not known

    def missing_for_transformer_engine(self) -> list[str]:
        """Return what Transformer Engine layers need and this machine lacks; empty where they can run."""
        missing = []
        if not self.nvidia_device:
            missing.append("an NVIDIA GPU")
        if self.torch_cuda is None:
            missing.append("a CUDA build of torch")
        if not self.transformer_engine:
            missing.append("Transformer Engine (pip install 'transformer-engine[pytorch]')")
        return missing


ELSEWHERE = Hardware(torch_cuda="any", nvidia_device=True, transformer_engine=True)
"""A machine that is planned for and not here: it has what a run can need."""


def detect_hardware() -> Hardware:
    """Return the facts of this machine."""
    devices = [Path("/dev/nvidiactl"), Path("/dev/dxg")]  # the second is WSL's
    return Hardware(
        torch_cuda=_torch_cuda_version(),
        nvidia_device=any(device.exists() for device in devices),
        transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
        shared_memory_bytes=_shared_memory_bytes(),
    )


def _shared_memory_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:  # there is none
        return None


def _torch_cuda_version() -> str | None:
    """Read torch/version.py as text: importing torch would fix its thread settings before they are made."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).parent / "version.py"
    found = re.search(
        r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]",
        version_file.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    return found.group(1) if found else None
