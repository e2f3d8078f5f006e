"""How long a phase may take. Pure; the supervisor's thread asks."""

import statistics
from collections import defaultdict, deque

from megagrpo.config.run_sections import WatchdogConfig

# durations of a phase that its median is taken over: enough to shrug off one slow step, few enough to follow
# a trend
RECENT = 16


class PhaseBudgets:
    """The budget of each phase: `factor` times the median of its recent durations, within [floor_seconds,
    limit_seconds].

    A phase that has not ended once yet has all of `limit_seconds`: its first run may compile, load and
    warm up.
    """

    def __init__(self, config: WatchdogConfig):
        self._config = config
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def record(self, phase: str, seconds: float) -> None:
        """Note how long a phase took."""
        self._recent[phase].append(seconds)

    def seconds(self, phase: str) -> float:
        """Return the budget."""
        if not self._recent[phase]:
            return self._config.limit_seconds
        wanted = max(self._config.floor_seconds, self._config.factor * statistics.median(self._recent[phase]))
        return min(wanted, self._config.limit_seconds)

    def explain(self, phase: str) -> str:
        """Return the arithmetic of the budget, for the message."""
        config, recent = self._config, self._recent[phase]
        if not recent:
            return f"{config.limit_seconds:g} s (watchdog.limit_seconds)"
        median = statistics.median(recent)
        return (
            f"{self.seconds(phase):g} s (watchdog: {config.factor:g} x the median {median:.3g} s, "
            f"within {config.floor_seconds:g} to {config.limit_seconds:g} s)"
        )
