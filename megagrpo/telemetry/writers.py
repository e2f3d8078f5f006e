"""Where metrics go: one row per step, to every writer of the run. Only rank 0 holds writers."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megagrpo.registry import Registry


class Writer(Protocol):
    """The contract. A writer is constructed with (run_dir, last_step).

    run_dir: the run's folder; it exists. last_step: the step that the run resumed after, None for a new run: rows of later steps
    (all rows, for a new run) that are still in the folder must not be seen again, so that no step is recorded twice.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; what is written must survive a crash of the process right after."""

    def close(self) -> None:
        """Flush and let go."""


class WriterFactory(Protocol):
    """What the registry holds."""

    def __call__(self, run_dir: Path, last_step: int | None) -> Writer: ...


WRITERS: Registry[WriterFactory] = Registry("writer")


@WRITERS.register("jsonl")
class JsonlWriter:
    """`metrics.jsonl`: one JSON object per step, `step` first. A number that is not finite is null: JSON knows no NaN."""

    def __init__(self, run_dir: Path, last_step: int | None = None):
        self.path = run_dir / "metrics.jsonl"
        truncate_rows(self.path, last_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append and flush one row."""
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@WRITERS.register("tensorboard")
class TensorboardWriter:
    """`tensorboard/`: one scalar per metric. Steps after the resumed one are purged from what TensorBoard shows."""

    def __init__(self, run_dir: Path, last_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # seconds of import, paid only where it is wanted

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=0 if last_step is None else last_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars and flush."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_writers(names: list[str], run_dir: Path, last_step: int | None) -> list[Writer]:
    """Return the writers called `names`, opened on `run_dir` (made where missing); see `Writer` for `last_step`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return [WRITERS.get(name)(run_dir, last_step) for name in names]


def truncate_rows(path: Path, last_step: int | None) -> None:
    """Drop the rows of `path` after `last_step` (all rows for None), and a last line that a crash cut off.

    Atomic; a missing file is fine.
    """
    if not path.exists():
        return
    kept = [] if last_step is None else [json.dumps(row) for row in read_rows(path) if row["step"] <= last_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, in order. A line that is no JSON object with a step (cut off by a crash) is passed over."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row
