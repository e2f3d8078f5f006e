"""The parent of a reward worker: `python -m megagrpo.rewards.keeper`, started by `worker_process.py`.

It starts the worker, and whatever ends it (the pool, the worker's own end, the end of the training process)
ends all that reward code started, in whatever session: orphans become its children. It runs no reward code.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from megagrpo.rewards.isolation import adopt_orphans, end_with_parent

_EVENTS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_KILL_SECONDS = 5.0  # after which a process that does not die (it waits for a device) is left to the kernel


def main() -> None:
    """Run a worker: `keeper PARENT MEMORY_BYTES NETWORK`."""
    parent, memory_bytes, network = (int(argument) for argument in sys.argv[1:4])
    signal.pthread_sigmask(signal.SIG_BLOCK, _EVENTS)
    adopt_orphans()
    end_with_parent(parent, signal.SIGTERM)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _EVENTS)
        from megagrpo.rewards.worker import serve  # here: the keeper stays small

        serve(keeper, memory_bytes, bool(network))
        sys.stdout.flush()
        os._exit(0)
    os.close(0)  # the worker alone answers: its end must be seen
    _end_like(_watch(worker))


def _watch(worker: int) -> int:
    """Wait for the worker's end or for a signal to end it; end all of it, and return the wait status of the
    worker.
    """
    while True:
        number = signal.sigwait(_EVENTS)
        for pid, status in _reap():
            if pid == worker:
                _end_children()
                return status
        if number != signal.SIGCHLD:
            return _end_children().get(worker, 0)


def _reap() -> list[tuple[int, int]]:
    """Return (process id, wait status) of every child that has ended."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (entry := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(entry)
    return ended


def _end_children() -> dict[int, int]:
    """Kill until no child is left: the children of one that is killed become this process's. Return their
    wait statuses.
    """
    ended: dict[int, int] = {}
    deadline = time.monotonic() + _KILL_SECONDS
    while (children := _list_children()) and time.monotonic() < deadline:
        for child in children:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still its own
        time.sleep(0.001)
        ended.update(_reap())
    return ended


def _list_children() -> list[int]:
    own, children = os.getpid(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                # "PID (NAME) STATE PARENT ...", and a name may hold brackets and blanks
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == own:
                    children.append(int(folder.name))
    return children


def _end_like(status: int) -> None:
    """End as the worker did, so that the pool learns how the worker ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
