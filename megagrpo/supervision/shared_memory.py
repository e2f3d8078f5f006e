"""Files in shared memory that outlive nobody: their maker holds a lock on them, which the system takes back
with its death, and the next run removes what nobody holds. No torch.
"""

import fcntl
import os
import stat
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megagrpo_"  # of every file of ours there
_YOUNG_SECONDS = 10.0  # a file that is younger may not have its lock yet


def hold(handle: int) -> None:
    """Lock a file that this process has just made, for as long as the descriptor, a copy of it or a mapping
    made from it lives.
    """
    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


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
        path.unlink(missing_ok=True)
        return True
    except OSError:  # held
        return False
    finally:
        os.close(handle)
