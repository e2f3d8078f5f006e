"""Files that are used as memory."""

import mmap
import os
from pathlib import Path

import torch

from megagrpo.supervision.orphaned_files import hold
from megagrpo.wire.shared_files import PREFIX, SHARED_MEMORY


def slot_path(token: str, version: int, replica: int, slot: int) -> Path:
    """Return the name of a slot in shared memory; no two runs, versions or replicas share one."""
    return SHARED_MEMORY / f"{PREFIX}{token}_v{version}_r{replica}_{slot}"


class MappedFile:
    """A file whose bytes are a tensor; what one process writes the others see. The creator removes it."""

    def __init__(self, path: Path, nbytes: int, create: bool):
        """Make the file (room for all of it is taken now: later there would be a SIGBUS), or map one that is
        there.

        Raises:
            OSError: no room, or no such file.
        """
        self.path, self._created = path, create
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                hold(handle)
                os.posix_fallocate(handle, 0, nbytes)
            self._mapped = mmap.mmap(handle, nbytes)
        except OSError as error:
            if create:
                path.unlink()
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)} ({nbytes} bytes)", str(path)
            ) from None
        finally:
            os.close(handle)
        self.tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def remove(self) -> None:
        """Remove the file, if this process made it; its memory goes with the last tensor that maps it."""
        if self._created:
            self.path.unlink(missing_ok=True)
