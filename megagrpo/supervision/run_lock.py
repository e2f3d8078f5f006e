"""One live run per run folder: a lock that the operating system takes back when its holder dies, however
it dies.
"""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megagrpo.errors import UserError
from megagrpo.parallel.agreement import on_first_rank

LOCK_FILE = "run.lock"


class RunLock:
    """The lock of a run folder, held by the first rank for all."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock on this process.

        A holder that has died holds nothing, whatever the file says. Where the file system has no locks, the
        file names the holder, and one whose process is gone from this host is taken over.

        Raises:
            UserError: a live run holds it (names both), or nothing can be written there.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"run.dir: {error.filename}: {error.strerror}") from error
        holder = _read(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(self._refusal(holder)) from None
        except OSError:  # no locks on this file system
            if holder and not _is_gone(holder):
                os.close(descriptor)
                raise UserError(f"{self._refusal(holder)}; if that run is gone, remove {self.path}") from None
        try:
            _write(descriptor, _self_description())
        except OSError as error:
            os.close(descriptor)
            raise UserError(f"run.dir: {self.path}: {error.strerror}") from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; without one held, do nothing."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _refusal(self, holder: dict[str, Any] | None) -> str:
        own = _self_description()
        who = (
            f"process {holder['pid']} on {holder['host']} since {holder['started']}"
            if holder
            else "another process"
        )
        return (
            f"run.dir: {self.path.parent}: in use by a live run ({who}); "
            f"this is process {own['pid']} on {own['host']}. Choose another run.dir, or end that run first"
        )


def hold_run_folder(run_dir: Path) -> RunLock:
    """Lock a run folder for this run. Collective over all ranks.

    Raises:
        UserError: on all ranks, where a live run holds it, or it cannot be written.
    """
    lock = RunLock(run_dir)
    on_first_rank(lock.acquire, UserError)
    return lock


def _self_description() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": started,
        "process_start": _process_start(os.getpid()),
    }


def _is_gone(holder: dict[str, Any]) -> bool:
    """Say whether the holder ran on this host and is no longer there; a process number may have been given
    out again.
    """
    return holder["host"] == socket.gethostname() and _process_start(holder["pid"]) != holder["process_start"]


def _process_start(pid: int) -> str | None:
    """Return the kernel's start time of a process, None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _read(descriptor: int) -> dict[str, Any] | None:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0) or b"null")
    except ValueError:
        return None  # cut off while it was written
    return (
        holder
        if isinstance(holder, dict) and holder.keys() >= {"pid", "host", "started", "process_start"}
        else None
    )


def _write(descriptor: int, description: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(description).encode(), 0)
    os.fsync(descriptor)
