"""Finds updates and steps that differ sharply from those before them: loss and gradient-norm spikes, rewards
that collapse.

Every value is compared with the running median of those before it, which one bad value does not move. All
ranks hold the same values, so they find the same. A value that is not finite is no spike: such an update is
skipped anyway.
"""

import math
import statistics

from megagrpo.config.training_sections import SpikesConfig

# Losses are sums of advantages of size 1 with weights that add up to 1: below this, many times the median
# means nothing, since on-policy losses with centred advantages are rounding noise.
LOSS_FLOOR = 1.0


class RollBack(Exception):
    """Raised on all ranks to go back to the newest checkpoint."""


class SpikeGuard:
    """The running medians of one run."""

    def __init__(self, config: SpikesConfig):
        self._config = config
        self._recent: dict[str, list[float]] = {}

    def state(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps."""
        return {name: list(values) for name, values in self._recent.items()}

    def load_state(self, state: dict[str, list[float]]) -> None:
        """Go on from what `state` returned."""
        self._recent = {name: list(values) for name, values in state.items()}

    def find_in_update(self, loss: float, grad_norm: float) -> str | None:
        """Say what is wrong with an update that is about to be applied; None: nothing."""
        found = [
            self._find_above("loss", abs(loss), self._config.loss_factor, LOSS_FLOOR),
            self._find_above("gradient norm", grad_norm, self._config.grad_norm_factor, 0.0),
        ]
        return next((text for text in found if text), None)

    def find_in_rewards(self, mean: float) -> str | None:
        """Say what is wrong with a step's mean reward; None: nothing."""
        fraction = self._config.reward_fraction
        if fraction is None or not math.isfinite(mean):
            return None
        median = self._take_median("reward", mean)
        if median is None or median <= 0 or mean >= fraction * median:
            return None
        return (
            f"mean reward {mean:.3g} is under {fraction:g} x the running median {median:.3g} "
            "(spikes.reward_fraction)"
        )

    def _find_above(self, name: str, value: float, factor: float | None, floor: float) -> str | None:
        if factor is None or not math.isfinite(value):
            return None
        median = self._take_median(name, value)
        if median is None or value <= max(floor, factor * median):
            return None
        field = "loss_factor" if name == "loss" else "grad_norm_factor"
        return f"{name} {value:.3g} is over {factor:g} x the running median {median:.3g} (spikes.{field})"

    def _take_median(self, name: str, value: float) -> float | None:
        """Return the median of the values before this one, None while there are too few, and take this one
        in: a new level is learned.
        """
        recent = self._recent.setdefault(name, [])
        median = statistics.median(recent) if len(recent) >= math.ceil(self._config.window / 2) else None
        recent.append(value)
        del recent[: -self._config.window]
        return median
