"""One rank's share of a request: what it holds, and what it tells the others of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from megagrpo.errors import UserError
from megagrpo.rollout.replica_states import EngineFailure
from megagrpo.rollout.rollouts import CompletionRecord, SampleKey
from megagrpo.types import Completion, Reward


@dataclass(frozen=True)
class ScoredCompletions:
    """What a rank has generated and scored."""

    completions: Mapping[SampleKey, Completion]
    rewards: Mapping[SampleKey, Reward]
    generation_seconds: float = 0.0
    scoring_wait_seconds: float = 0.0  # after the last completion, until the last score
    failure: EngineFailure | None = None  # of the engine, before the share was complete

    def joined(self, later: "ScoredCompletions") -> "ScoredCompletions":
        """Return this share with what came later, and the later one's failure."""
        return ScoredCompletions(
            {**self.completions, **later.completions},
            {**self.rewards, **later.rewards},
            self.generation_seconds + later.generation_seconds,
            self.scoring_wait_seconds + later.scoring_wait_seconds,
            later.failure,
        )


@dataclass(frozen=True)
class ShareMetadata:
    """A share without its tokens."""

    rank: int
    records: list[CompletionRecord]
    generation_seconds: float
    scoring_wait_seconds: float
    failure: EngineFailure | None

    @property
    def groups(self) -> set[int]:
        """The groups that are there."""
        return {record.key[0] for record in self.records}


@dataclass(frozen=True)
class ShareFailure:
    """A share that failed otherwise than by its engine."""

    message: str
    by_user: bool  # a mistake of the user's, told in plain lines


def describe_share(share: ScoredCompletions, rank: int) -> ShareMetadata:
    """Return what the others get to know."""
    records = [
        CompletionRecord(
            key,
            rank,
            len(c.token_ids),
            c.finish_reason,
            share.rewards[key],
            min(version for _, version in c.weight_versions),
        )
        for key, c in share.completions.items()
    ]
    return ShareMetadata(rank, records, share.generation_seconds, share.scoring_wait_seconds, share.failure)


def describe_failure(error: BaseException) -> ShareFailure:
    """Return what the others get to know."""
    by_user = isinstance(error, UserError)
    return ShareFailure(str(error) if by_user else f"{type(error).__name__}: {error}", by_user)
