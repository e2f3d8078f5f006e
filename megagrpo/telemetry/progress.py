"""The lines of a run, on the screen and in `log.txt`."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from megagrpo.telemetry import names
from megagrpo.telemetry.display import Display
from megagrpo.telemetry.patient_file import PatientFile
from megagrpo.telemetry.step_line import format_step, style_line


class Progress:
    """Prints and logs notes, and a line per step: its own numbers, and one more for its evaluation.

    Args:
        run_dir: the line is appended to `log.txt` in here, with the time of day.
        num_steps: of the whole run.
        display: the screen.
    """

    def __init__(self, run_dir: Path, num_steps: int, display: Display):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._num_steps, self._display = num_steps, display
        self._log = PatientFile(run_dir / "log.txt")

    def note(self, text: str) -> None:
        """Print and log one line that belongs to no step: a resume, a warning, where the results are."""
        self._display.print(Text(text, style="yellow" if text.startswith("warning") else ""))
        self._write(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step's line as far as the screen is wide, and log all of it."""
        self._display.print(style_line(format_step(step, self._num_steps, metrics, self._display.width)))
        self._write(format_step(step, self._num_steps, metrics))

    def close(self) -> None:
        """Take the live display down and write what the log still has to."""
        self._display.close()
        self._log.flush()

    def _write(self, text: str) -> None:
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
        # where that fails the line waits; it has been printed, and the storage is reported by the writers
        self._log.flush()


def evaluation_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metric of each held-out set, as far as there is one."""
    return {name: value for name, value in metrics.items() if names.evaluation_set(name)}
