"""Files in shared memory that the processes of an engine make for each other (rings between vLLM's processes,
SGLang's table of loads), which stay where a signal has ended their makers. Standard library only.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megagrpo_"  # begins the name of every file of ours there
LEDGER = "MEGAGRPO_SHARED_FILES"  # environment variable of a server: the file that names them


def list_files() -> set[str]:
    """Return the names of all files in shared memory."""
    try:
        return {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.is_file(follow_symlinks=False)}
    except OSError:  # no such folder: nothing is shared there
        return set()


def files_of_group(group: int) -> set[str]:
    """Return the names of the files in shared memory that the processes of a process group have mapped."""
    inodes: set[int] = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if entry.isdecimal() and os.getpgid(int(entry)) == group:
                inodes |= mapped_inodes(entry)
    try:
        names = {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes}
    except OSError:
        return set()
    return {name for name in names if not name.startswith(PREFIX)}


def mapped_inodes(process: str) -> set[int]:
    """Return what a process, named as in /proc, has mapped of shared memory. Not by its name: a semaphore is
    mapped under a first name and then given its own.

    Raises:
        OSError: it has ended, or is another user's.
    """
    text = Path("/proc", process, "maps").read_text(encoding="utf-8", errors="replace")
    return {
        int(inode) for inode in re.findall(rf"^(?:\S+ +){{4}}(\d+) +{SHARED_MEMORY}/", text, re.MULTILINE)
    }


def read_ledger(text: str) -> list[str]:
    """Return the names in a ledger, one a line; what is no plain name is passed over."""
    return [name for name in text.split("\n") if name and "/" not in name and name not in (".", "..")]


def remove(names: Iterable[str]) -> None:
    """Remove this user's files of these names."""
    for name in names:
        with contextlib.suppress(OSError):  # it is gone, or another's
            if (SHARED_MEMORY / name).lstat().st_uid == os.geteuid():
                (SHARED_MEMORY / name).unlink()
