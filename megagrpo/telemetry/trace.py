"""A trace of one step by torch's profiler, with the run's phases named: `telemetry.trace_step`.

Each rank writes `trace/step_XXXXXX_rank_R.json.gz`; Perfetto (ui.perfetto.dev) and chrome://tracing open it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class StepTrace:
    """Traces one step of a run, and costs nothing in all others."""

    def __init__(self, run_dir: Path, step: int, rank: int, note: Callable[[str], None]):
        """Take what is traced and where it goes.

        Args:
            step: the step to trace; 0: none.
            note: told where the trace is, or why there is none.
        """
        self._step, self._note = step, note
        self._path = run_dir / "trace" / f"step_{step:06d}_rank_{rank}.json.gz"
        self._open: list[Any] | None = None  # regions of the phases that run; None: nothing is traced

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace what the block runs, where it is the step that is wanted. A step that raises leaves no
        trace.
        """
        if step != self._step:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._open = []
        try:
            with torch.profiler.profile(activities=activities) as profiler:
                yield
        finally:
            self._open = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._note(f"warning: the trace of step {step} can't be written: {error}")
        else:
            self._note(f"trace of step {step} in {self._path.parent}")

    def enter(self, phase: str) -> None:
        """Name the work of a phase in the trace."""
        if self._open is not None:
            region = torch.profiler.record_function(f"phase: {phase}")
            region.__enter__()
            self._open.append(region)

    def leave(self, phase: str, seconds: float) -> None:
        """End the phase that was entered last."""
        if self._open:
            self._open.pop().__exit__(None, None, None)
