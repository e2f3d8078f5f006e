"""Files in shared memory that outlive nobody: their maker holds a lock on them, which the system takes back
with its death, and the next run removes what nobody holds. No torch.

Other programs' files bear names of their own: a ledger, which is such a file of ours, names those that the
servers which this process starts have made.
"""

import contextlib
import fcntl
import os
import secrets
import stat
import time
from pathlib import Path

from megagrpo.wire.shared_files import (
    PREFIX,
    SHARED_MEMORY,
    files_of_group,
    list_files,
    read_ledger,
    remove,
)

_LEDGER_PREFIX = f"{PREFIX}ledger_"
_YOUNG_SECONDS = 10.0  # a file that is younger may not have its lock yet


def hold(handle: int) -> None:
    """Lock a file that this process has just made, for as long as the descriptor, a copy of it or a mapping
    made from it lives.
    """
    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


class Ledger:
    """The files in shared memory that a server, and what it starts, has made since this was built.

    Attributes:
        path: of the file that names them, one a line.
    """

    def __init__(self) -> None:
        self._before = list_files()
        self._names: set[str] = set()
        self.path = SHARED_MEMORY / f"{_LEDGER_PREFIX}{os.getpid()}_{secrets.token_hex(4)}"
        try:
            self._handle: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            hold(self._handle)
        except OSError:  # full, or not there: they are known to this process alone
            self._handle = None
        _ledgers.add(self)

    def note(self, group: int) -> None:
        """Add what the processes of the server's process group have mapped."""
        new = sorted(files_of_group(group) - self._before - self._names)
        self._names.update(new)
        if self._handle is not None:
            with contextlib.suppress(OSError):  # full
                os.write(self._handle, "".join(f"{name}\n" for name in new).encode())

    def close(self) -> None:
        """Remove them, once the server has ended, and the ledger."""
        _ledgers.discard(self)
        remove([*self._names, self.path.name])
        self._names.clear()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


_ledgers: set[Ledger] = set()  # all that this process holds


def close_ledgers() -> None:
    """Remove what servers of this process, which were killed, have left."""
    for ledger in list(_ledgers):
        ledger.close()


def remove_orphans(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's files whose makers were killed; return their names."""
    return [path.name for path in sorted(folder.glob(f"{PREFIX}*")) if _remove_orphan(path)]


def _remove_orphan(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # another user's, a link, or gone
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or time.time() - status.st_mtime < _YOUNG_SECONDS:
            return False
        if status.st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.name.startswith(_LEDGER_PREFIX):
            remove(read_ledger(os.read(handle, status.st_size).decode(errors="replace")))
        path.unlink(missing_ok=True)
        return True
    except OSError:  # held
        return False
    finally:
        os.close(handle)
