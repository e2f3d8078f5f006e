"""Counts the completions that rewards could not score, and stops where that is all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.errors import SharedUserError
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import Reward


@dataclass(frozen=True)
class ScoreCounts:
    """How many completions were scored, and how many were not."""

    total: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)  # how many failed in which way
    first: str = ""  # what the first one failed with

    @property
    def failed(self) -> int:
        """Completions without a score."""
        return sum(self.outcomes.values())

    def __add__(self, other: "ScoreCounts") -> "ScoreCounts":
        """Return the counts of both."""
        outcomes = Counter(self.outcomes) + Counter(other.outcomes)
        return ScoreCounts(self.total + other.total, outcomes, self.first or other.first)

    def describe(self) -> str:
        """Return one line, e.g. `3 of 256 completions could not be scored (timeout 3); first: ...`."""
        kinds = ", ".join(f"{outcome} {count}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.failed} of {self.total} completions could not be scored ({kinds}); first: {self.first}"

    def require_any(self, what: str) -> None:
        """Raise SharedUserError where nothing was scored: what a policy learns from it means nothing."""
        if self.total and self.failed == self.total:
            raise SharedUserError(f"scorer outage: {what}: {self.describe()}")


def count_scores(rollouts: StepRollouts) -> ScoreCounts:
    """Return the counts of all completions, the same on all ranks."""
    rewards = [record.reward for record in rollouts.records.values()]
    failed = [reward for reward in rewards if reward.outcome != "ok"]
    first = f"{failed[0].outcome}: {failed[0].detail}" if failed else ""
    return ScoreCounts(len(rewards), Counter(reward.outcome for reward in failed), first)


def failed_fractions(place: str, counts: ScoreCounts) -> dict[str, float]:
    """Return `PLACE/failed_fraction`, and that of each outcome which came."""
    total = max(counts.total, 1)
    return {f"{place}/failed_fraction": counts.failed / total} | {
        f"{place}/failed_fraction/{outcome}": count / total for outcome, count in counts.outcomes.items()
    }


def mean_parts(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return `reward/NAME` for each reward and `reward/NAME/PART` for what it is made of: means over the
    completions that it has an opinion on.
    """
    values: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in {**reward.parts, **reward.subparts}.items():
            if value is not None:
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(entries) / len(entries) for name, entries in values.items()}
