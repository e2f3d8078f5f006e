"""Wall-clock and CPU seconds of a run and its steps."""

import time

from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.telemetry import names


class RunClock:
    """Starts with the process; a run's seconds go on over its resumes."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.start_step()

    def go_on_from(self, seconds: float) -> None:
        """Count the `seconds` that earlier processes have spent on the run."""
        self._started -= seconds

    def run_seconds(self) -> float:
        """Return the wall-clock seconds of the run so far."""
        return time.perf_counter() - self._started

    def start_step(self) -> None:
        """Begin to count a step."""
        self._step_started, self._cpu_started = time.perf_counter(), time.process_time()

    def step_metrics(self) -> dict[str, float]:
        """Return the step's seconds, and its CPU-seconds over all ranks. Collective over all ranks."""
        return {
            names.STEP_SECONDS: time.perf_counter() - self._step_started,
            names.STEP_CPU_SECONDS: sum(all_gather_metadata(time.process_time() - self._cpu_started)),
        }
