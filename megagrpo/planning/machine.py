"""What a machine has beside packages: shared memory, disk, ports, GPUs. Looked at within a second or two."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 2**30  # weights go to engine servers, and NCCL's messages between ranks, through it
LEAST_DISK_BYTES = 10 * 2**30  # a checkpoint of a small model, and its optimizer
_PROBE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Machine:
    """What was found."""

    shared_free: int | None  # bytes; None: there is none
    disk_free: int  # bytes, of the current folder
    # measured over a write that reached the disk; None: the folder can't be written
    disk_bytes_per_second: float | None
    loopback_error: str | None  # why a connection over it failed
    gpus: tuple[str, ...]  # name and memory

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, what was found)."""
        speed = self.disk_bytes_per_second
        written = "can't be written" if speed is None else f"written at {speed / 1e6:.0f} MB/s"
        free = self.shared_free
        shared = "none" if free is None else f"{free / 2**30:.1f} GiB free in {SHARED_MEMORY}"
        return [
            *(("GPU", gpu) for gpu in self.gpus),
            ("shared memory", shared),
            ("disk of this folder", f"{self.disk_free / 2**30:.1f} GiB free, {written}"),
            ("loopback", self.loopback_error or "takes connections"),
        ]

    def problems(self) -> list[str]:
        """Return what would stop or slow a run, one line each, with what to do."""
        found = []
        if self.shared_free is None or self.shared_free < LEAST_SHARED_BYTES:
            found.append(
                f"{SHARED_MEMORY} is small, and engine servers get weights through it: docker --shm-size=16g"
            )
        if self.disk_free < LEAST_DISK_BYTES:
            found.append("little disk is free here: take a run.dir on another one")
        if self.disk_bytes_per_second is None:
            found.append("this folder can't be written: take a run.dir elsewhere")
        if self.loopback_error:
            found.append(f"the loopback does not work, and ranks meet on it: {self.loopback_error}")
        return found


def look_at_machine(folder: Path = Path()) -> Machine:
    """Look; leave no file behind.

    Args:
        folder: whose disk is measured.
    """
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return Machine(
        shared, shutil.disk_usage(folder).free, _write_speed(folder), _try_loopback(), _list_gpus()
    )


def _write_speed(folder: Path) -> float | None:
    started = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(2**20) * (_PROBE_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return None
    return _PROBE_BYTES / (time.perf_counter() - started)


def _try_loopback() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return str(error)
    return None


def _list_gpus() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in said.splitlines() if line.strip())
