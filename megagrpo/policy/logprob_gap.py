"""The token on which engine and actor differ most, and the gate on it.

Only completions that the actor's own weights sampled are judged: on older ones the difference holds what the
policy has learned since.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megagrpo.config.schema import RolloutConfig
from megagrpo.errors import UserError
from megagrpo.policy.batch import MicroBatch
from megagrpo.rollout.rollouts import SampleKey, StepRollouts


@dataclass(frozen=True)
class LogprobGap:
    """One token, as engine and actor see it."""

    key: SampleKey
    position: int  # of the token in its completion, from 0
    token_id: int
    rollout_logprob: float
    actor_logprob: float

    @property
    def gap(self) -> float:
        """|engine - actor|; NaN where either is."""
        return abs(self.rollout_logprob - self.actor_logprob)


class LargestGap:
    """Finds the largest gap over micro-batches; what it keeps stays on the device until it is asked."""

    def __init__(self) -> None:
        self._candidates: list[tuple[MicroBatch, torch.Tensor]] = []

    def add(
        self,
        batch: MicroBatch,
        rows: torch.Tensor,
        actor_logprobs: torch.Tensor,
        ages: Mapping[SampleKey, int],
    ) -> None:
        """Look at a micro-batch.

        Args:
            rows: int64 [K], the micro-batch's rows that are compared.
            actor_logprobs: [K] before the update, of these rows.
            ages: publishes between the weights that sampled a completion and the actor's.
        """
        if rows.numel() == 0:
            return
        actor, rollout = actor_logprobs.detach().double(), batch.rollout_logprobs[rows].double()
        fresh = batch.per_row(ages, torch.int64)[rows] == 0
        # argmax takes NaN for the largest
        row = torch.where(fresh, (actor - rollout).abs(), -1.0).argmax(keepdim=True)
        columns = (
            fresh,
            batch.sequence_ids[rows],
            batch.positions[rows],
            batch.targets[rows],
            rollout,
            actor,
        )
        self._candidates.append(
            (batch, torch.cat([column.index_select(0, row).double() for column in columns]))
        )

    def result(self) -> LogprobGap | None:
        """Return this rank's largest gap; None where no row is the actor's own."""
        gaps = []
        for batch, values in self._candidates:
            fresh, sequence, position, token_id, rollout, actor = values.tolist()
            if fresh:
                gaps.append(
                    LogprobGap(batch.keys[int(sequence)], int(position), int(token_id), rollout, actor)
                )
        return largest(gaps)


def largest(gaps: Iterable[LogprobGap | None]) -> LogprobGap | None:
    """Return the largest of several; one that is not a number is the largest, and of equal ones the first
    completion's.
    """
    found = [gap for gap in gaps if gap is not None]
    return min(
        found,
        key=lambda gap: (gap.gap == gap.gap, -gap.gap if gap.gap == gap.gap else 0.0, gap.key, gap.position),
        default=None,
    )


def check_logprob_gap(
    gap: LogprobGap | None, rollouts: StepRollouts, config: RolloutConfig, step: int
) -> str | None:
    """Compare a step's largest gap with `rollout.max_logprob_gap`, before its first update. All ranks pass
    the same.

    Returns:
        The warning where it is larger and the run goes on; None where there is nothing to say.

    Raises:
        UserError: it is larger, and `logprob_gap_action` is `stop`.
    """
    if gap is None or config.max_logprob_gap is None or gap.gap <= config.max_logprob_gap:
        return None
    group, place = gap.key
    message = (
        f"step {step}: engine and actor log-probs differ by up to {gap.gap:.3e}, rollout.max_logprob_gap is "
        f"{config.max_logprob_gap:.3e}: "
        f"prompt {rollouts.prompts[group].id}, completion {place}, token {gap.position} (id {gap.token_id}): "
        f"engine {gap.rollout_logprob:.6f}, actor {gap.actor_logprob:.6f}, weight version "
        f"{rollouts.records[gap.key].weight_version}"
    )
    if config.logprob_gap_action == "stop":
        raise UserError(f"{message}; nothing was updated in this step")
    return message
