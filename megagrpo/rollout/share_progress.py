"""Counts how far this rank's share of a rollout has come."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from megagrpo.telemetry.activity import Counts
from megagrpo.types import Completion


class ShareProgress:
    """Completions, tokens a second and scores of one share."""

    def __init__(self, counts: Counts, num_groups: int, completions_per_prompt: int):
        """Counts nothing yet; `counts` is told."""
        self._counts, self._each = counts, completions_per_prompt
        self._total, self._completions, self._tokens = num_groups * completions_per_prompt, 0, 0
        self.completed((), ())

    def completed(self, group: Sequence[Completion], scores: Collection[Future[Any]]) -> None:
        """A group has ended; `scores` are those that were asked for so far."""
        self._completions += len(group)
        self._tokens += sum(len(completion.token_ids) for completion in group)
        self._counts("completions", self._completions, self._total)
        self._counts("tok", self._tokens, None)
        self.scored(scores)

    def scored(self, scores: Collection[Future[Any]]) -> None:
        """Some of `scores`, one a group, may be there."""
        self._counts("scored", self._each * sum(score.done() for score in scores), self._total)
