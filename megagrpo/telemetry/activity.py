"""What this rank is doing now, in one line: what is built, or the phase of a step, with counts, time gone and
time left. The parts of a run write to it; a display reads it from a thread of its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Counts = Callable[[str, int, int | None], None]
"""Told how far something has come: what is counted, how many are done, how many there are (None: unknown)."""

_TAIL_BYTES = 4096
_LAST_LINE_CHARACTERS = 60
_ESTIMATE_AFTER = 0.1  # the fraction of items before which the time that is left is a guess


def count_nothing(what: str, done: int, total: int | None) -> None:
    """Ignore a count."""


@dataclass
class _Phase:
    name: str
    started: float
    counts: dict[str, tuple[int, int | None]] = field(default_factory=dict)


class Activity:
    """The phases that this rank is in, innermost last.

    Attributes:
        step: the newest step that is finished.
    """

    def __init__(self, num_steps: int, clock: Callable[[], float] = time.monotonic):
        self._num_steps, self._clock = num_steps, clock
        self._began = clock()
        self._building: tuple[str, float, Path | None] | None = None
        self._phases: list[_Phase] = []
        self._last_seconds: dict[str, float] = {}  # how long a phase took the last time
        self.step = 0
        self._first: tuple[int, float] | None = None  # first step that was finished here, and when
        self._newest_at = self._began

    # ---- told

    def build(self, what: str, log: Path | None = None) -> None:
        """Say what is built before the first step, e.g. `the actor`.

        Args:
            log: file that another process writes meanwhile; its last line is shown.
        """
        self._building = (what, self._clock(), log)

    def enter(self, name: str) -> None:
        """A phase starts; has the form of `PhaseTimers`' on_enter."""
        self._building = None
        self._phases = [*self._phases, _Phase(name, self._clock())]

    def leave(self, name: str, seconds: float) -> None:
        """The innermost phase ends; has the form of `PhaseTimers`' on_leave."""
        self._last_seconds[name] = seconds
        self._phases = self._phases[:-1]

    def count(self, what: str, done: int, total: int | None) -> None:
        """Note how far the innermost phase has come; see `Counts`."""
        phases = self._phases
        if phases:
            phases[-1].counts = phases[-1].counts | {what: (done, total)}

    def finish_step(self, step: int) -> None:
        """Note that a step is trained, published, evaluated and recorded."""
        self.step, self._newest_at = step, self._clock()
        if self._first is None or step <= self._first[0]:
            self._first = (step, self._newest_at)

    # ---- read

    def describe(self) -> str:
        """Return the line, e.g. `step 3/40  rollout 12 s: 96/256 completions, 1210 tok/s, 20 s left  |  run:
        4 min left`.
        """
        now, building, phases = self._clock(), self._building, self._phases
        if building is not None or not phases:
            what, since, log = building or ("the run", self._began, None)
            here, in_all = format_seconds(now - since), format_seconds(now - self._began)
            line = f"building {what}: {here}, {in_all} since the start"
            return line if log is None else f"{line}; log {log}: {last_line(log)}"
        phase = phases[-1]
        seconds = now - phase.started
        counted = [_format_count(what, *count, seconds) for what, count in phase.counts.items()]
        left = self._phase_left(phase, seconds)
        if left is not None:
            counted.append(f"{format_seconds(left)} left")
        line = f"{self._place()}  {phase.name} {format_seconds(seconds)}"
        line += f": {', '.join(counted)}" if counted else ""
        run_left = self.run_seconds_left(now)
        return line if run_left is None else f"{line}  |  run: {format_seconds(run_left)} left"

    def run_seconds_left(self, now: float) -> float | None:
        """Return what the remaining steps take if they are as long as those so far, evaluations included;
        None before two steps.
        """
        if self._first is None or self.step <= self._first[0]:
            return None
        first, at = self._first
        each = (self._newest_at - at) / (self.step - first)
        return max(0.0, each * (self._num_steps - self.step) - (now - self._newest_at))

    def _place(self) -> str:
        return f"step {min(self.step + 1, self._num_steps)}/{self._num_steps}"

    def _phase_left(self, phase: _Phase, seconds: float) -> float | None:
        bounded = [(done, total) for done, total in phase.counts.values() if total]
        if bounded:
            done, total = min(bounded, key=lambda count: count[0] / count[1])
            if done >= total or done < _ESTIMATE_AFTER * total:
                return None
            return seconds * (total - done) / done
        last = self._last_seconds.get(phase.name)
        return None if last is None or last < max(seconds, 1.0) else last - seconds


def _format_count(what: str, done: int, total: int | None, seconds: float) -> str:
    if total is not None:
        return f"{done}/{total} {what}"
    return f"{done / max(seconds, 1e-9):.0f} {what}/s"


def format_seconds(seconds: float) -> str:
    """Return a time span as a person says it: `42 s`, `4 min 10 s`, `3 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def last_line(path: Path) -> str:
    """Return the end of the last line that says something in a log file; empty where there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][-_LAST_LINE_CHARACTERS:] if said else ""
