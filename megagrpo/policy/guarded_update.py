"""A step's updates, behind all that may hold them back: a stop that was asked for, and the gate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from megagrpo.algorithms.diagnostics import FRESH_GAP
from megagrpo.config.training_sections import SpikesConfig
from megagrpo.errors import SharedUserError
from megagrpo.policy.actor import AppliedUpdate
from megagrpo.policy.logprob_gap import LogprobGap, LogprobGapGate
from megagrpo.policy.spikes import RollBack, SpikeGuard
from megagrpo.policy.update import PolicyUpdater, UpdateResult
from megagrpo.policy.update_metrics import compute_update_metrics
from megagrpo.rollout.rollouts import StepRollouts


class UpdateGate:
    """Decides, step by step, whether an update is applied: engine and actor agree, the numbers are finite,
    nothing spikes. Its decisions are functions of numbers that all ranks hold.
    """

    def __init__(
        self,
        spikes: SpikesConfig,
        logprob_gap: LogprobGapGate,
        max_nonfinite_in_a_row: int,
        note: Callable[[str], None],
    ):
        """Take the bounds, and begin with no history.

        Args:
            max_nonfinite_in_a_row: updates that are not finite, one after the other, that end the run.
            note: told what the user should know, on all ranks; rank 0 prints it.
        """
        self._config, self._logprob_gap, self._note = spikes, logprob_gap, note
        self._max_nonfinite = max_nonfinite_in_a_row
        self.spikes = SpikeGuard(spikes)
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
            SharedUserError: they differ by more than rollout.logprob_gap allows.
        """
        self._loss = metrics.get("loss", 0.0)
        self._logprob_gap.check(gap, metrics.get(FRESH_GAP), rollouts, self._step)

    def accepts(self, grad_norm: float) -> bool:
        """Say whether the update that `before_apply` saw is applied.

        Raises:
            RollBack: it is not, and the run goes back to its newest checkpoint.
        """
        return self._decide(self.spikes.find_in_update(self._loss, grad_norm))

    def count_nonfinite(self, in_a_row: int, updates: Sequence[AppliedUpdate]) -> int:
        """Return how many updates in a row were not finite, after these.

        Raises:
            SharedUserError: as many as run.max_nonfinite_steps.
        """
        for update in updates:
            in_a_row = 0 if update.is_finite else in_a_row + 1
            if in_a_row >= self._max_nonfinite:
                raise SharedUserError(
                    f"step {self._step}: {in_a_row} updates in a row had a loss or gradient that is not "
                    "finite "
                    "(run.max_nonfinite_steps); the weights are those before them"
                )
        return in_a_row

    def metrics(self) -> dict[str, float]:
        """Return the step's count of spikes, where any kind is judged."""
        spikes = self._config
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
        action = self._config.action
        if action == "roll_back":
            raise RollBack(f"step {self._step}: {found}")
        self._note(
            f"warning: step {self._step}: {found}" + ("; the update is skipped" if action == "skip" else "")
        )
        return action == "warn"


@dataclass(kw_only=True, eq=False)
class GuardedUpdate:
    """What the trainer updates the policy through."""

    updater: PolicyUpdater
    gate: UpdateGate
    learning_rate: Callable[[int], float]  # takes how many updates the run has made
    stop_if_asked: Callable[[], None]  # raises where any rank was asked to stop; collective over all ranks
    # the weights are those of the last finished step: no update has been applied since
    is_step_untouched: bool = field(init=False, default=True)

    @property
    def updates_per_step(self) -> int:
        """Updates that the schedule counts for a step, whether or not there was anything to train."""
        return self.updater.update.updates_per_step

    def run(
        self,
        step: int,
        rollouts: StepRollouts,
        mean_reward: float | None,
        *,
        updates: int,
        nonfinite_in_a_row: int,
        weight_version: int,
    ) -> tuple[dict[str, float], int]:
        """Train on one step's groups, if the gate lets them. Collective over all ranks.

        Args:
            mean_reward: of all that was sampled; None: nothing was.
            updates: that the run has made before.
            nonfinite_in_a_row: the newest updates that were not finite.
            weight_version: of the actor now.

        Returns:
            The step's metrics, and the updates in a row that were not finite, after these.

        Raises:
            StopRequested: before anything was applied.
            RollBack, SharedUserError: see UpdateGate.
        """
        self.gate.start_step(step)
        result = UpdateResult({})
        if self.gate.accepts_rewards(mean_reward):
            result = self.updater.run(
                rollouts,
                learning_rate=lambda k: self.learning_rate(updates + k),
                before_apply=partial(self._before_apply, rollouts),
                before_pass=self.stop_if_asked,
                accepts=self.gate.accepts,
                weight_version=weight_version,
            )
            self.is_step_untouched = not any(update.applied for update in result.applied)
            nonfinite_in_a_row = self.gate.count_nonfinite(nonfinite_in_a_row, result.applied)
        metrics = compute_update_metrics(result, self.updater.actor.learning_rate) | self.gate.metrics()
        return metrics, nonfinite_in_a_row

    def _before_apply(
        self, rollouts: StepRollouts, metrics: Mapping[str, float], gap: LogprobGap | None
    ) -> None:
        """Decide before an update is applied; the first of a step is the last point at which the step can
        be given up.
        """
        if self.is_step_untouched:
            self.stop_if_asked()
        self.gate.before_apply(metrics, gap, rollouts)
        self.is_step_untouched = False
