"""Wall-clock and CPU seconds of each phase of a step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class PhaseTimers:
    """Accumulates the seconds of named phases until they are taken.

    CPU seconds are those of all threads of this process; child processes (reward workers, engines of their
    own) are not in them. A phase may run inside another; each counts its own whole span.

    Example:
        >>> timers = PhaseTimers()
        >>> with timers.phase("rollout"):
        ...     pass
        >>> sorted(timers.take())
        ['time/rollout_cpu_seconds', 'time/rollout_seconds']
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        on_enter: Sequence[Callable[[str], None]] = (),
        on_leave: Sequence[Callable[[str, float], None]] = (),
    ):
        """Begin with no seconds.

        Args:
            synchronize: called at both ends of a phase, e.g. `device.finish_queued_work`; without it work
                that a device has only queued is counted in the phase that waits for it.
            on_enter: told each phase's name as it starts, e.g. for a live display.
            on_leave: told each phase's name and wall-clock seconds as it ends, while the exception that ends
                it is handled.
        """
        self._synchronize = synchronize
        self.on_enter, self.on_leave = list(on_enter), list(on_leave)
        self._wall: dict[str, float] = {}
        self._cpu: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's seconds under `name`, also where it raises."""
        for listener in self.on_enter:
            listener(name)
        self._settle()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._settle()
            seconds = time.perf_counter() - wall
            self._wall[name] = self._wall.get(name, 0.0) + seconds
            self._cpu[name] = self._cpu.get(name, 0.0) + time.process_time() - cpu
            for listener in self.on_leave:
                listener(name, seconds)

    def wall_seconds(self, name: str) -> float:
        """Return the wall-clock seconds of a phase since the last `take`; 0 where it has not run."""
        return self._wall.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """Return `time/NAME_seconds` and `time/NAME_cpu_seconds` of each phase, and start again from zero."""
        taken: dict[str, float] = {}
        for name, seconds in self._wall.items():
            taken[f"time/{name}_seconds"] = seconds
            taken[f"time/{name}_cpu_seconds"] = self._cpu[name]
        self._wall.clear()
        self._cpu.clear()
        return taken

    def _settle(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
