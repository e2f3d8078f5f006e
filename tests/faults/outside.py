"""Attacks on a whole launch from outside: signals to the launcher at any moment of the start, and a client
from another machine at the same moment. What a launch leaves behind is looked for ten seconds later.
"""

import contextlib
import ctypes
import fcntl
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megagrpo.wire.shared_files import SHARED_MEMORY, mapped_inodes

LEAVE_SECONDS = 10.0  # that anything may stay after the launcher's end
# Names of files in shared memory that are looked for: engine servers name theirs as they like, and so do
# those of other runs on this machine.
OWN_FILES, ALL_FILES = "megagrpo_[!l]*", "*"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Signal:
    """A signal to the launcher, so many seconds after its start."""

    number: signal.Signals
    after_seconds: float

    def strike(self, launcher: psutil.Process) -> list[psutil.Process]:
        """Knock at every port, send the signal, and return the processes that must end with the launcher.

        Raises:
            AssertionError: another machine would have been let in.
        """
        time.sleep(self.after_seconds)
        try:
            processes = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:  # it has finished before that
            return []
        knock(processes)
        launcher.send_signal(self.number)
        return processes


def knock(processes: Sequence[psutil.Process]) -> None:
    """Come to each port on which the processes listen as another machine would."""
    outside = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    for process in processes:
        try:
            ports = {each.laddr.port for each in process.net_connections() if each.status == "LISTEN"}
        except psutil.Error:
            continue
        for port in ports:
            for address in outside:
                try:
                    socket.create_connection((address, port), 2).close()
                except OSError:
                    continue
                raise AssertionError(f"{process.pid} lets {address}:{port} in")


def left_behind(processes: Sequence[psutil.Process], files_before: set[str], names: str) -> list[str]:
    """Return what is left ten seconds after a launch's end, one line each."""
    deadline = time.monotonic() + LEAVE_SECONDS
    _, alive = psutil.wait_procs(processes, timeout=LEAVE_SECONDS)
    while (files := shared_files(names) - files_before) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = [
        f"process {each.pid} is left: {' '.join(each.cmdline())[:200]}" for each in alive if is_alive(each)
    ]
    return lines + [f"{SHARED_MEMORY / name} is left" for name in sorted(files)]


def adopt_orphans() -> None:
    """Let what processes of this one leave behind come to this one, so that it can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[psutil.Process]:
    """Return all processes that this one has started, or has adopted."""
    return set(psutil.Process().children(recursive=True))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_files(names: str) -> set[str]:
    """Return the files in shared memory, of these names, that no live process has mapped or locked."""
    mapped: set[int] = set()
    for process in psutil.pids():
        with contextlib.suppress(OSError):
            mapped |= mapped_inodes(str(process))
    found: set[str] = set()
    for path in SHARED_MEMORY.glob(names):
        with contextlib.suppress(OSError):  # it has gone
            if path.is_file() and path.stat().st_ino not in mapped and not is_held(path):
                found.add(path.name)
    return found


def is_held(path: Path) -> bool:
    """Say whether a process holds the lock that its maker takes on a file there, or it is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except OSError:
        return True
