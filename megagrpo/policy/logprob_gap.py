"""The token on which engine and actor differ most, and the gate on the gaps of a step.

Only completions that the actor's own weights sampled are judged: on older ones the difference holds what the
policy has learned since.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from megagrpo.config.rollout_sections import LogprobGapConfig
from megagrpo.errors import SharedUserError
from megagrpo.parallel.plain_data import exchangeable
from megagrpo.policy.batch import MicroBatch
from megagrpo.rollout.rollouts import SampleKey, StepRollouts

# Largest of some thousand float32 rounding errors: 3e-6 (0.3 M parameters) to 5e-5 (135 M), more for larger
# models; another rope base gives 0.1 and more.
WARN_ABOVE_FLOAT32 = 1e-3
WARN_ABOVE_ROUNDED = 0.5  # bfloat16 and float8 differ by a few hundredths of a nat on most tokens
STEPS_BETWEEN_WARNINGS = 50
CAUSES = (
    "likely causes: the engine serves other weights, reads another rope or norm setting, or computes in "
    "another number format"
)


@exchangeable
@dataclass(frozen=True)
class LogprobGap:
    """One token, as engine and actor see it."""

    key: SampleKey
    position: int  # the token's place in its completion, from 0
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


class LogprobGapGate:
    """Compares each step's gaps with the bounds of `rollout.logprob_gap`, before its first update. All ranks
    pass the same numbers, so they decide alike.
    """

    def __init__(self, config: LogprobGapConfig, warn_above: float | None, note: Callable[[str], None]):
        """Take the bounds.

        Args:
            warn_above: what `config.warn_above` came to; None: never.
            note: told the warnings.
        """
        self._config, self._warn_above, self._note = config, warn_above, note
        self._noted_at: int | None = None  # step of the last warning
        self._silent = 0  # steps over the bound since then

    def check(self, gap: LogprobGap | None, mean: float | None, rollouts: StepRollouts, step: int) -> None:
        """Warn, or end the run.

        Args:
            gap: the largest one of the step; None: no token is the actor's own.
            mean: over the same tokens.

        Raises:
            SharedUserError: a bound that ends the run is exceeded.
        """
        if gap is None:
            return
        config, place = self._config, _describe(gap, rollouts)
        if mean is not None and _exceeds(mean, config.stop_above_mean):
            raise SharedUserError(
                f"step {step}: engine and actor log-probs differ by {mean:.3e} in the mean, "
                f"rollout.logprob_gap.stop_above_mean is {config.stop_above_mean:.3e}; the largest gap is "
                f"{gap.gap:.3e}: {place}; {CAUSES}; nothing was updated in this step"
            )
        if _exceeds(gap.gap, config.stop_above):
            raise SharedUserError(
                f"step {step}: engine and actor log-probs differ by up to {gap.gap:.3e}, "
                f"rollout.logprob_gap.stop_above is {config.stop_above:.3e}: {place}; {CAUSES}; nothing was "
                "updated in this step"
            )
        if _exceeds(gap.gap, self._warn_above):
            self._warn(gap, mean, place, step)

    def _warn(self, gap: LogprobGap, mean: float | None, place: str, step: int) -> None:
        if self._noted_at is not None and step - self._noted_at < STEPS_BETWEEN_WARNINGS:
            self._silent += 1
            return
        since = f" ({self._silent} more steps since the last warning)" if self._silent else ""
        self._noted_at, self._silent = step, 0
        self._note(
            f"warning: step {step}: engine and actor log-probs differ by up to {gap.gap:.3e}, "
            f"{math.nan if mean is None else mean:.1e} in the mean; rollout.logprob_gap.warn_above is "
            f"{self._warn_above:.1e}{since}: {place}; {CAUSES}"
        )


def warning_bound(config: LogprobGapConfig, is_float32: bool, is_narrowed: bool) -> float | None:
    """Return what `warn_above` comes to.

    Args:
        is_float32: actor and engine both compute in float32.
        is_narrowed: top_p or top_k leave tokens out of the engine's log-probs.
    """
    if config.warn_above != "auto":
        return config.warn_above
    if is_narrowed:
        return None
    return WARN_ABOVE_FLOAT32 if is_float32 else WARN_ABOVE_ROUNDED


def _exceeds(value: float, bound: float | None) -> bool:
    """Say whether a value is over its bound; one that is not a number is over every bound."""
    return bound is not None and not value <= bound


def _describe(gap: LogprobGap, rollouts: StepRollouts) -> str:
    group, place = gap.key
    return (
        f"prompt {rollouts.prompts[group].id}, completion {place}, token {gap.position} (id {gap.token_id}): "
        f"engine {gap.rollout_logprob:.6f}, actor {gap.actor_logprob:.6f}, weight version "
        f"{rollouts.records[gap.key].weight_version}"
    )
