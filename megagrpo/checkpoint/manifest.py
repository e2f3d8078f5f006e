"""`manifest.json`: what a checkpoint consists of, written last. A folder without it is no checkpoint.
Pure: files and JSON only. What is written here has its checksum taken as it goes, so that it need not be read
again.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megagrpo.parallel.plain_data import exchangeable

MANIFEST = "manifest.json"
FORMAT_VERSION = 4
"""Raised with every change of what is saved beside the weights. 1: pickles of random generators, no states of
parts. 2: `carried/` in JSON, the states of named parts in `trainer_state.json`, what the prompts were.
3: rollouts in flight by spans.
4: what the columns of the prompts and the held-out sets were.
"""
OLDEST_RESUMABLE = 4
"""What is older lacks what a run needs to go on as it would have."""
_BLOCK_BYTES = 4 * 2**20

# A file as a whole, or in parts that follow one another.
FileContents = bytes | Sequence[bytes | memoryview]


class ManifestError(Exception):
    """A manifest that is missing or cannot be read."""


@exchangeable
@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str  # relative to the checkpoint
    size: int  # bytes
    crc32: str  # over the whole file, eight hexadecimal digits


@exchangeable
@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    weight_version: int
    model: Mapping[str, Any]  # see identity.py
    tokenizer: Mapping[str, Any]
    layout: Mapping[str, Any]  # the layout of the run that wrote it
    versions: Mapping[str, str]  # package versions of that run
    files: Sequence[FileRecord]
    # source and checksums of the frozen weights, where the run has some
    reference: Mapping[str, Any] | None = None
    score: float | None = None  # checkpoint.best_metric at this very step, where it was evaluated
    format_version: int = FORMAT_VERSION


class ChecksummedFile:
    """A new file, written from start to end; forced to disk when the context ends.

    Not buffered: what is large comes in large pieces, for which neither the write nor the checksum holds
    Python's lock.
    """

    def __init__(self, folder: Path, name: str):
        """`name`: of the file in the checkpoint."""
        self.name, self._size, self._crc32 = name, 0, 0
        self.error: OSError | None = None  # from the first write that failed
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


def checksum_file(path: Path) -> str:
    """Return the CRC-32 of a file as eight hexadecimal digits."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def record_file(folder: Path, name: str) -> FileRecord:
    """Return the record of a file as it is on disk now."""
    path = folder / name
    return FileRecord(name, path.stat().st_size, checksum_file(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and force it to disk."""
    path = folder / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest of this format version or an older one.

    A manifest of a newer format is returned with what can be read of it; see `Manifest.format_version`.

    Raises:
        ManifestError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {name: values[name] for name in Manifest.__dataclass_fields__ if name in values}
        known["files"] = tuple(FileRecord(**record) for record in values["files"])
        return Manifest(**known)
    except FileNotFoundError:
        raise ManifestError(f"no {MANIFEST}: the save was not finished") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ManifestError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error


def verify_files(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """Return what is wrong with the files, one line each: missing, of another size, of other bytes."""
    problems = []
    for record in records:
        path = folder / record.name
        try:
            size = path.stat().st_size
            if size != record.size:
                problems.append(f"{record.name}: {size} bytes, the manifest says {record.size}")
            elif (found := checksum_file(path)) != record.crc32:
                problems.append(f"{record.name}: checksum {found}, the manifest says {record.crc32}")
        except FileNotFoundError:
            problems.append(f"{record.name}: missing")
        except OSError as error:
            problems.append(f"{record.name}: not readable: {error}")
    return problems
