"""The processes around a rank: its siblings on the same host, its children, its end."""

import faulthandler
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

import psutil

from megagrpo.supervision.board import Board
from megagrpo.supervision.failure import say
from megagrpo.supervision.orphaned_files import close_ledgers

_END_SECONDS = 2.0  # the longest wait for killed children to be gone


class Siblings:
    """The other ranks that this host's launcher started: they can be looked at without their help."""

    def __init__(self, board: Board):
        local_rank, count = (
            int(os.environ.get("LOCAL_RANK", "0")),
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        first = board.rank - local_rank
        self._board = board
        self._unknown = set(range(first, first + count)) - {board.rank}
        # None: it was gone before it could be looked at
        self._processes: dict[int, psutil.Process | None] = {}

    def dead(self) -> list[int]:
        """Return the ranks whose process is gone though they did not say that they leave."""
        self._look_up()
        return [
            rank
            for rank, process in self._processes.items()
            if not _is_alive(process) and not self._board.has_left(rank)
        ]

    def kill(self, rank: int) -> bool:
        """Kill a sibling that does not answer (frozen, say), so that the launcher need not wait for it;
        say whether that was done.
        """
        self._look_up()
        process = self._processes.get(rank)
        if process is None or not _is_alive(process):
            return False
        process.kill()
        return True

    def _look_up(self) -> None:
        for rank in sorted(self._unknown):
            found = self._board.process(rank)
            if found is None:
                continue
            self._unknown.discard(rank)
            host, pid = found
            try:
                process = psutil.Process(pid)
                if host == socket.gethostname() and process.ppid() == os.getppid():
                    self._processes[rank] = process
            except psutil.NoSuchProcess:
                self._processes[rank] = None


def _is_alive(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def dump_stacks(folder: Path, rank: int) -> Path:
    """Write the Python stacks of all threads of this process to `folder/rank_0001.txt` and return the path.

    Storage may be what the process waits for: where it can't be written to, the stacks go to standard error.
    """
    path = folder / f"rank_{rank:04d}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
    except OSError as error:
        say(f"rank {rank}: {path}: {error}; its stacks:")
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    return path


def leave_now(code: int) -> NoReturn:
    """End this process and everything that it has started, without waiting for any thread: the main one
    may hang in a collective.
    """
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=_END_SECONDS)
    close_ledgers()
    os._exit(code)
