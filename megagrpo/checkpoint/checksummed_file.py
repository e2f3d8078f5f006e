"""A file whose checksum is taken of what goes into it, so that it need not be read again."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagrpo.checkpoint.manifest import FileRecord

# of a file: as a whole, or in parts that follow one another
FileContents = bytes | Sequence[bytes | memoryview]


class ChecksummedFile:
    """A new file, written from start to end; forced to disk when the context ends.

    Not buffered: what is large comes in large pieces, for which neither the write nor the checksum holds
        Python's lock.
    """

    def __init__(self, folder: Path, name: str):
        """`name`: of the file in the checkpoint."""
        self.name, self._size, self._crc32 = name, 0, 0
        self.error: OSError | None = None  # of the first write that failed
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object.

        Raises:
            OSError: it could not; `error` keeps the first one, since torch's writer of tensors complains
                in its own words of a file that such an error has left short.
        """
        view = memoryview(data).cast("B")
        self._crc32 = zlib.crc32(view, self._crc32)
        self._size += len(view)
        written = 0
        try:
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError as error:
            self.error = self.error or error
            raise
        return written

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def record(self) -> FileRecord:
        """Return the manifest's record of what was written."""
        return FileRecord(self.name, self._size, f"{self._crc32:08x}")

    def __enter__(self) -> "ChecksummedFile":
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, *_: object) -> None:
        try:
            if error_type is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if self.error is not None and error is not self.error:
            raise self.error from error


def write_file(folder: Path, name: str, contents: FileContents) -> FileRecord:
    """Write a file, force it to disk and return the manifest's record of it."""
    with ChecksummedFile(folder, name) as file:
        for part in [contents] if isinstance(contents, bytes) else contents:
            file.write(part)
    return file.record()
