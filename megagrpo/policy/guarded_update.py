"""A step's updates, behind all that may hold them back: a stop that was asked for, and the gate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from megagrpo.policy.logprob_gap import LogprobGap
from megagrpo.policy.update import PolicyUpdater, UpdateResult
from megagrpo.policy.update_gate import UpdateGate
from megagrpo.policy.update_metrics import compute_update_metrics
from megagrpo.rollout.rollouts import StepRollouts


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
