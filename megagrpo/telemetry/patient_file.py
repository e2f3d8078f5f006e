"""A file that only grows, and that waits where the storage fails: a full disk costs no row, and never the
run.
"""

import os
from pathlib import Path


class PatientFile:
    """Appends whole records. What cannot be written waits in memory, and goes to the file with the next flush
    that can.

    Nothing is held open between two flushes, so that a file system that went away and came back is no
    obstacle.
    """

    def __init__(self, path: Path):
        """The file may exist: what is in it stays."""
        self.path = path
        self.error: OSError | None = None  # what stopped the newest flush; None: everything is in the file
        self._waiting = b""
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, record: bytes) -> None:
        """Take one record; `flush` brings it to the file."""
        self._waiting += record

    def flush(self) -> bool:
        """Append all records that wait; return whether that succeeded. `error` holds the reason where it did
        not.
        """
        try:
            append(self.path, self._size, self._waiting)
        except OSError as error:
            self.error = error
            return False
        self._size += len(self._waiting)
        self._waiting, self.error = b"", None
        return True

    @property
    def waiting_bytes(self) -> int:
        """Size of what is not in the file yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Flush once more; whatever still waits is lost."""
        self.flush()


def append(path: Path, size: int, data: bytes) -> None:
    """Write `data` behind the first `size` bytes of the file, made where missing; what a failed attempt
    has left there goes away.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
        left = memoryview(data)
        while left:
            written = os.pwrite(descriptor, left, size)
            left, size = left[written:], size + written
    finally:
        os.close(descriptor)
