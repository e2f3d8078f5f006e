"""The one line that a step leaves on the screen and in `log.txt`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from megagrpo.telemetry import names
from megagrpo.telemetry.patient_file import PatientFile


class Progress:
    """Prints one line per step, and on a terminal the phase that is running below it. Only rank 0 holds one.

    Args:
        run_dir: the line is appended to `log.txt` in here, with the time of day.
        num_steps: of the whole run.
        file: where to print; standard output where None.
    """

    def __init__(self, run_dir: Path, num_steps: int, file: TextIO | None = None):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._num_steps = num_steps
        self._log = PatientFile(run_dir / "log.txt")
        self._console = Console(file=file, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._step = 0

    def note(self, text: str) -> None:
        """Print and log one line that belongs to no step: a resume, a warning, where the results are."""
        self._clear()
        self._console.print(Text(text))
        self._write(text)

    def phase(self, name: str) -> None:
        """Show which phase runs now (on a terminal only); has the form of `PhaseTimers`' on_enter."""
        if not self._console.is_terminal:
            return
        text = f"step {self._step + 1}/{self._num_steps}: {name}"
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print and log the line of a finished step."""
        self._clear()
        self._step = step
        self._console.print(_styled(step, self._num_steps, metrics))
        self._write(format_step(step, self._num_steps, metrics))

    def close(self) -> None:
        """Take the live display down and write what the log still has to."""
        self._clear()
        self._log.flush()

    def _clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _write(self, text: str) -> None:
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
        # where that fails the line waits; it has been printed, and the storage is reported by the writers
        self._log.flush()


def format_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Return the line of a step, e.g. `step  3/100  reward 0.412  loss -1.2e-03  grad 1.203  gap 1.2e-06
    1234 tok/s  0.45 s`.

    What the metrics do not hold is left out, so that a step without evaluation has no `eval` in its line.
    """
    return "  ".join([f"step {step:>{len(str(num_steps))}}/{num_steps}", *_parts(metrics)])


def _parts(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    if names.REWARD in metrics:
        parts.append(f"reward {metrics[names.REWARD]:.3f}")
    parts += [
        f"eval {held_out} {value:.3f}"
        for name, value in metrics.items()
        if (held_out := names.evaluation_set(name))
    ]
    if names.LOSS in metrics:
        parts.append(f"loss {metrics[names.LOSS]:.1e}")
    if names.GRAD_NORM in metrics:
        parts.append(f"grad {metrics[names.GRAD_NORM]:.3f}")
    if metrics.get(names.SKIPPED_UPDATES):
        parts.append(f"SKIPPED {metrics[names.SKIPPED_UPDATES]:.0f} (not finite)")
    if names.LOGPROB_GAP in metrics:
        parts.append(f"gap {metrics[names.LOGPROB_GAP]:.1e}")
    seconds = metrics.get(names.STEP_SECONDS)
    if seconds:
        if names.GENERATED_TOKENS in metrics:
            parts.append(f"{metrics[names.GENERATED_TOKENS] / seconds:.0f} tok/s")
        parts.append(f"{seconds:.2f} s")
    return parts


def _styled(step: int, num_steps: int, metrics: Mapping[str, float]) -> Text:
    styles = {"reward": "green", "eval": "bold green", "step": "bold", "SKIPPED": "bold red"}
    text = Text()
    for index, part in enumerate(format_step(step, num_steps, metrics).split("  ")):
        text.append(("  " if index else "") + part, style=styles.get(part.split(" ")[0], ""))
    return text
