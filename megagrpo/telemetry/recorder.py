"""Everything that rank 0 writes about a run, behind one door."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.config.run_sections import TelemetryConfig
from megagrpo.supervision.redaction import redact
from megagrpo.telemetry.activity import Activity
from megagrpo.telemetry.completions import Samples, write_completions
from megagrpo.telemetry.display import Display
from megagrpo.telemetry.earlier_run import METRICS, set_aside_earlier_run
from megagrpo.telemetry.evaluation_files import evaluation_file, write_evaluation
from megagrpo.telemetry.health import Health, look_at_disk
from megagrpo.telemetry.patient_file import PatientFile
from megagrpo.telemetry.progress import Progress, evaluation_of
from megagrpo.telemetry.summary import build_summary, save_summary
from megagrpo.telemetry.warnings_file import WARNING, Warnings
from megagrpo.telemetry.writers import open_writers, read_rows
from megagrpo.types import Prompt


class NullRecorder:
    """The recorder of every rank but the first: takes everything and keeps nothing."""

    def open(self, last_step: int | None, last_row: Mapping[str, float] | None = None) -> None:
        """Begin to record.

        Args:
            last_step: the newest step that is recorded already; rows of later steps are dropped. None for a
                new run: what an earlier one has recorded in the folder is moved aside.
            last_row: metrics of that step, recorded again where its row was lost.
        """

    def note(self, text: str) -> None:
        """Print and log one line that belongs to no step; before `open` it waits. One that begins with
        `warning: ` is kept in `warnings.jsonl` too, for the report.
        """

    def warn_once(self, name: str, text: str) -> None:
        """Note a warning, the first time in the run that it has this name."""

    def close(self) -> None:
        """Show nothing live any more."""

    def roll_back(self, step: int | None, cause: str, prompts: Sequence[Prompt]) -> None:
        """Add a line to `roll_backs.jsonl`: the step that was given up, why, and its prompts."""

    def rewind(self, last_step: int) -> None:
        """Drop the rows after `last_step`: the run goes on from there again."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step's own numbers, before its evaluation."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass one step's metrics to all writers, and print the part that `show` has not printed. Storage
        that fails is reported and tried again with the next step; the run goes on.
        """

    def completions(self, step: int, samples: Callable[[], Samples]) -> None:
        """Keep a few of the step's groups, where they are due: the first step, the last, and between."""

    def held_out(self, step: int, name: str, samples: Callable[[], Samples]) -> None:
        """Keep a few groups of an evaluation set."""

    def evaluation(self, step: int, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the results of all evaluation sets, prompt by prompt."""

    def finish(
        self,
        wall_seconds: float,
        peak_rss_bytes: Sequence[int],
        peak_device_bytes: Sequence[int] = (),
        loss: str | None = None,
    ) -> None:
        """Write `summary.json`, say where the results are, close everything.

        Args:
            wall_seconds: of the whole run so far.
            peak_rss_bytes: largest resident memory of each rank, in rank order.
            peak_device_bytes: the same of its device; 0 where it has none.
            loss: what the run came to and could not keep.
        """


class Recorder(NullRecorder):
    """Progress line, metric writers, completion samples and the final summary of a run folder."""

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        config: TelemetryConfig,
        run_config: str,
        display: Display | None = None,
        on_summary: Callable[[Mapping[str, Any]], object] = lambda summary: None,
    ):
        """Prepare the recorder; `open` opens the files.

        Args:
            run_config: the resolved configuration of the run, for `config.yaml`.
            display: the screen; a new one where None.
            on_summary: writes what else is to be told of a finished run: the card of its export.
        """
        self._on_summary = on_summary
        self._run_config = run_config
        self._display = display or Display(Activity(num_steps))
        self._shown: int | None = None  # step whose own numbers are on the screen
        self._run_dir, self._num_steps, self._config = run_dir, num_steps, config
        self._failing: set[str] = set()  # what could not be written the last time
        self._waiting: list[str] = []  # notes from before `open`
        self._warnings = Warnings(run_dir)
        self._health = Health()
        self._progress: Progress | None = None

    def open(self, last_step: int | None, last_row: Mapping[str, float] | None = None) -> None:
        """See NullRecorder."""
        moved_to = set_aside_earlier_run(self._run_dir) if last_step is None else None
        self._progress = Progress(self._run_dir, self._num_steps, self._display)
        self._open(last_step)
        self._patiently(
            "config.yaml", partial((self._run_dir / "config.yaml").write_text, self._run_config, "utf-8")
        )
        if last_step is None:
            self.note(f"run folder {self._run_dir}")
        if moved_to is not None:
            self._waiting.append(
                f"an earlier run without a checkpoint to go on from has left records; now in {moved_to}"
            )
        self._warnings.open()
        for text in self._waiting:
            self.note(text)
        self._waiting.clear()
        path = self._run_dir / METRICS
        is_lost = path.exists() and all(row["step"] != last_step for row in read_rows(path))
        if last_step is not None and last_row and is_lost:
            self._patiently("jsonl", partial(self._writers["jsonl"].write, last_step, last_row))

    def _open(self, last_step: int | None) -> None:
        self._writers = open_writers(self._config.writers, self._run_dir, last_step)

    def rewind(self, last_step: int) -> None:
        """See NullRecorder."""
        for name, writer in self._writers.items():
            self._patiently(name, writer.close)
        self._open(last_step)

    def note(self, text: str) -> None:
        """See NullRecorder."""
        text = redact(text)
        if self._progress is None:
            self._waiting.append(text)
            return
        self._progress.note(text)
        if text.startswith(WARNING):
            self._warnings.add(self._display.activity.step, "", text.removeprefix(WARNING))

    def warn_once(self, name: str, text: str) -> None:
        """See NullRecorder."""
        text = redact(text)
        if self._progress is not None and self._warnings.add(self._display.activity.step, name, text):
            self._progress.note(f"{WARNING}{text}")

    def close(self) -> None:
        """See NullRecorder."""
        self._display.close()

    def roll_back(self, step: int | None, cause: str, prompts: Sequence[Prompt]) -> None:
        """See NullRecorder."""
        line = {
            "step": step,
            "cause": cause,
            "prompts": [{"id": prompt.id, "text": prompt.text} for prompt in prompts],
        }
        file = PatientFile(self._run_dir / "roll_backs.jsonl")
        file.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
        if not file.flush():
            self.note(f"warning: {file.path}: {file.error}: {line}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See NullRecorder."""
        for name, writer in self._writers.items():
            self._patiently(name, partial(writer.write, step, metrics))
        assert self._progress is not None, "open it first"
        shown = evaluation_of(metrics) if self._shown == step else metrics
        if shown:
            self._progress.step(step, shown)
        self._display.activity.finish_step(step)
        for warning in [*self._health.look(metrics), *look_at_disk(self._run_dir)]:
            self.warn_once(warning.name, warning.text)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """See NullRecorder."""
        assert self._progress is not None, "open it first"
        self._shown = step
        self._progress.step(step, metrics)

    def completions(self, step: int, samples: Callable[[], Samples]) -> None:
        """See NullRecorder."""
        every, count = self._config.completions_every, self._config.completions_count
        if step == self._num_steps or (every and (step == 1 or step % every == 0)):
            self._patiently("completions", lambda: write_completions(self._run_dir, step, samples(), count))

    def held_out(self, step: int, name: str, samples: Callable[[], Samples]) -> None:
        """See NullRecorder."""
        if self._config.completions_every:
            count = self._config.completions_count
            self._patiently(
                "completions", lambda: write_completions(self._run_dir, step, samples(), count, name)
            )

    def evaluation(self, step: int, describe: Callable[[], Mapping[str, Any]]) -> None:
        """See NullRecorder."""
        path = evaluation_file(self._run_dir, step)
        self._patiently("evaluations", lambda: write_evaluation(path, describe()))

    def _patiently(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if what not in self._failing:
                self.note(f"warning: {what} can't be written now: {error}; the run goes on and tries again")
            self._failing.add(what)
            return
        if what in self._failing:
            self._failing.discard(what)
            self.note(f"{what} can be written again")

    def finish(
        self,
        wall_seconds: float,
        peak_rss_bytes: Sequence[int],
        peak_device_bytes: Sequence[int] = (),
        loss: str | None = None,
    ) -> None:
        """See NullRecorder."""
        for name, writer in self._writers.items():
            self._patiently(name, writer.close)
        summary = build_summary(
            read_rows(self._run_dir / METRICS),
            wall_seconds=wall_seconds,
            peak_rss_bytes=peak_rss_bytes,
            peak_device_bytes=peak_device_bytes,
        )
        path = save_summary(self._run_dir, summary)
        self._patiently("model card", partial(self._on_summary, summary))
        self.note(f"done: results in {self._run_dir}, summary in {path}")
        if loss is not None:
            self.note(f"warning: {loss}")
        assert self._progress is not None
        self._progress.close()
