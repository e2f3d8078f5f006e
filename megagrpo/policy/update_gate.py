"""Decides, on all ranks alike, whether an update is applied: engine and actor agree, the numbers are
finite, nothing spikes.
"""

from collections.abc import Callable, Mapping, Sequence

from megagrpo.config.schema import Config
from megagrpo.errors import UserError
from megagrpo.policy.actor import AppliedUpdate
from megagrpo.policy.logprob_gap import LogprobGap, check_logprob_gap
from megagrpo.policy.spikes import RollBack, SpikeGuard
from megagrpo.rollout.rollouts import StepRollouts


class UpdateGate:
    """Asked by the trainer, step by step. Its decisions are functions of numbers that all ranks hold."""

    def __init__(self, config: Config, note: Callable[[str], None]):
        """`note`: told what the user should know, on all ranks; rank 0 prints it."""
        self.config, self._note = config, note
        self.spikes = SpikeGuard(config.spikes)
        self._step, self._loss, self._count = 0, 0.0, 0

    def start_step(self, step: int) -> None:
        """Begin to judge a step."""
        self._step, self._count = step, 0

    def accepts_rewards(self, mean: float | None) -> bool:
        """Say whether a step with this mean reward (None: no completion) may train.

        Raises:
            RollBack: it may not, and the run goes back to its newest checkpoint.
        """
        return mean is None or self._decide(self.spikes.find_in_rewards(mean))

    def before_apply(
        self, metrics: Mapping[str, float], gap: LogprobGap | None, rollouts: StepRollouts
    ) -> None:
        """Look at an update's metrics before its gradient is; the first one of a step must come from an
        engine that agrees.

        Raises:
            UserError: rollout.max_logprob_gap is exceeded.
        """
        self._loss = metrics.get("loss", 0.0)
        warning = check_logprob_gap(gap, rollouts, self.config.rollout, self._step)
        if warning is not None:
            self._note(f"warning: {warning}")

    def accepts(self, grad_norm: float) -> bool:
        """Say whether the update that `before_apply` saw is applied.

        Raises:
            RollBack: it is not, and the run goes back to its newest checkpoint.
        """
        return self._decide(self.spikes.find_in_update(self._loss, grad_norm))

    def count_nonfinite(self, in_a_row: int, updates: Sequence[AppliedUpdate]) -> int:
        """Return how many updates in a row were not finite, after these.

        Raises:
            UserError: as many as run.max_nonfinite_steps.
        """
        for update in updates:
            in_a_row = 0 if update.is_finite else in_a_row + 1
            if in_a_row >= self.config.run.max_nonfinite_steps:
                raise UserError(
                    f"step {self._step}: {in_a_row} updates in a row had a loss or gradient that is not "
                    "finite "
                    "(run.max_nonfinite_steps); the weights are those before them"
                )
        return in_a_row

    def metrics(self) -> dict[str, float]:
        """Return the step's count of spikes, where any kind is judged."""
        spikes = self.config.spikes
        is_judging = (spikes.loss_factor, spikes.grad_norm_factor, spikes.reward_fraction) != (
            None,
            None,
            None,
        )
        return {"update/spikes": self._count} if is_judging else {}

    def _decide(self, found: str | None) -> bool:
        if found is None:
            return True
        self._count += 1
        action = self.config.spikes.action
        if action == "roll_back":
            raise RollBack(f"step {self._step}: {found}")
        self._note(
            f"warning: step {self._step}: {found}" + ("; the update is skipped" if action == "skip" else "")
        )
        return action == "warn"
