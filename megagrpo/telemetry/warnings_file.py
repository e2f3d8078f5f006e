"""`warnings.jsonl`: the warnings of a run, for its report; a resumed run gives none of them again."""

import json
from pathlib import Path
from typing import Any

from megagrpo.telemetry.patient_file import PatientFile

FILE = "warnings.jsonl"
WARNING = "warning: "  # how the line of a warning begins, on the screen and in the log


class Warnings:
    """Keeps the warnings of one run folder."""

    def __init__(self, run_dir: Path):
        """Nothing is read before `open`."""
        self._path, self._names = run_dir / FILE, set[str]()
        self._file: PatientFile | None = None

    def open(self) -> None:
        """Read the warnings that the run gave before it was resumed."""
        self._names = {line["name"] for line in read_warnings(self._path.parent) if line["name"]}
        self._file = PatientFile(self._path)

    def add(self, step: int, name: str, text: str) -> bool:
        """Keep a warning, unless the run had one of its `name`; say whether that was new. An empty name is
        always new. What can't be written now waits.
        """
        assert self._file is not None, "open it first"
        if name and name in self._names:
            return False
        self._names.add(name)
        line = json.dumps({"step": step, "name": name, "text": text}, ensure_ascii=False)
        self._file.write(f"{line}\n".encode())
        self._file.flush()
        return True


def read_warnings(run_dir: Path) -> list[dict[str, Any]]:
    """Return the warnings of a run, oldest first: step (the newest that was finished), name, text."""
    try:
        lines = (run_dir / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [read for line in lines if (read := _read(line)) is not None]


def _read(line: str) -> dict[str, Any] | None:
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(read, dict) and {"step", "name", "text"} <= read.keys()
    return read if is_whole else None
