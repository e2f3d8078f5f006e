"""Where metrics go: one row per step, to every writer of the run. Only rank 0 holds writers."""

import json
import math
import os
import shutil
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megagrpo.config.differences import read_settings
from megagrpo.registry import Registry, require_call, require_methods
from megagrpo.telemetry.patient_file import PatientFile


class Writer(Protocol):
    """The contract. A writer is constructed with (run_dir, last_step), and raises an OSError where it can't
    write now.

    run_dir: the run's folder; it exists. last_step: the step that the run resumed after, None for a new run:
    rows of later steps (all rows, for a new run) that are still in the folder must not be seen again, so that
    no step is recorded twice.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; what is written must survive a crash of the process right after.

        Raises:
            OSError: it could not be written now; it is with the next call that can, as far as the writer is
                able to keep it.
        """

    def close(self) -> None:
        """Flush and let go."""


class WriterFactory(Protocol):
    """What the registry holds."""

    def __call__(self, run_dir: Path, last_step: int | None) -> Writer: ...


def _read_writer(attribute: Any) -> WriterFactory:
    require_call(attribute, ["run_dir", "last_step"])
    if isinstance(attribute, type):
        require_methods(attribute, {"write": ["step", "metrics"], "close": []})
    return attribute


WRITERS: Registry[WriterFactory] = Registry("metrics writer", _read_writer)


@WRITERS.register("jsonl")
class JsonlWriter:
    """`metrics.jsonl`: one JSON object per step, `step` first. A number that is not finite is null: JSON
    knows no NaN.
    """

    def __init__(self, run_dir: Path, last_step: int | None = None):
        self.path = run_dir / "metrics.jsonl"
        truncate_rows(self.path, last_step)
        self._file = PatientFile(self.path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append and flush one row."""
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(f"{json.dumps({'step': step, **row})}\n".encode())
        _flush(self._file)

    def close(self) -> None:
        """Write what waits."""
        _flush(self._file)


@WRITERS.register("tensorboard")
class TensorboardWriter:
    """`tensorboard/`: one scalar per metric; the configuration as a text and, where it differs from the
    defaults, as hyperparameters. Steps after the resumed one are purged from what TensorBoard shows.

    Events are written here and now: the thread that torch's SummaryWriter writes in dies of the first error
    of the storage, and the next flush then waits for it for ever.
    """

    def __init__(self, run_dir: Path, last_step: int | None = None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # imported only where it is wanted
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = PatientFile(
            folder / f"events.out.tfevents.{_next_time(folder):020d}.{socket.gethostname()}.{os.getpid()}"
        )
        self._events, self._event = RecordWriter(self._file), Event
        self._run_dir, self._has_config = run_dir, False
        first_step = 0 if last_step is None else last_step + 1
        self._add(Event(step=first_step, file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars, with the first ones the configuration."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._has_config and (settings := read_settings(self._run_dir)) is not None:
            self._add_config(settings)
            self._has_config = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(self._event(step=step, summary=Summary(value=values)))
        _flush(self._file)

    def close(self) -> None:
        """Write what waits."""
        _flush(self._file)

    def _add_config(self, settings: dict[str, str]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        # a text is shown as Markdown: indented lines keep their shape
        text = textwrap.indent((self._run_dir / "config.yaml").read_text(encoding="utf-8"), "    ")
        self._add(self._event(summary=text_pb("config", text)))
        self._add(self._event(summary=hparams_pb(settings, trial_id=self._run_dir.resolve().name)))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write(event.SerializeToString())


@WRITERS.register("wandb")
def open_wandb(run_dir: Path, last_step: int | None = None) -> Writer:
    """Weights & Biases, with the names of `metrics.jsonl`."""
    from megagrpo.telemetry.wandb_writer import WandbWriter  # imported only where it is wanted

    return WandbWriter(run_dir, last_step)


@WRITERS.register("mlflow")
def open_mlflow(run_dir: Path, last_step: int | None = None) -> Writer:
    """MLflow, with the names of `metrics.jsonl`."""
    from megagrpo.telemetry.mlflow_writer import MlflowWriter  # imported only where it is wanted

    return MlflowWriter(run_dir, last_step)


def _next_time(folder: Path) -> int:
    """Return the time in nanoseconds, later than that of every file of events in the folder.

    TensorBoard reads them in the order of their names: after a clock was set back, a resumed run's steps
    would count as the older ones.
    """
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*.*")]
    return max([time.time_ns(), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])


def _flush(file: PatientFile) -> None:
    if not file.flush():
        assert file.error is not None
        raise file.error


def open_writers(names: Sequence[str], run_dir: Path, last_step: int | None) -> dict[str, Writer]:
    """Return the writers that `names` mean (registered, or FILE.py:NAME), opened on `run_dir` (made where
    missing); see `Writer` for `last_step`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    return {name: WRITERS.find(name)(run_dir, last_step) for name in names}


def truncate_rows(path: Path, last_step: int | None) -> None:
    """Drop the rows of `path` after `last_step` (all rows for None), and a last line that a crash cut off.

    Atomic; a missing file is fine. Where other lines are damaged too, the file as it was stays beside it as
    `metrics.damaged.jsonl`.
    """
    if not path.exists():
        return
    lines = list(_read_lines(path))
    if any(row is None for _, row in lines[:-1]):
        shutil.copy(path, path.with_suffix(".damaged.jsonl"))
    kept = [
        line for line, row in lines if row is not None and last_step is not None and row["step"] <= last_step
    ]
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in kept))
    os.replace(temporary, path)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, in order. A line that is no JSON object with a step (cut off by a
    crash, or damaged) is passed over.
    """
    for _, row in _read_lines(path):
        if row is not None:
            yield row


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line with its row; None where it holds none."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                # a damaged byte within a name must not cost the numbers beside it
                row = json.loads(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                row = None
            is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
            yield line, row if is_row else None
