"""From a configured reward to a function over completions."""

import importlib
from collections.abc import Collection, Sequence
from math import isfinite
from typing import Protocol

from megagrpo.errors import UserError
from megagrpo.registry import is_code_place
from megagrpo.rewards.custom import CustomReward
from megagrpo.rewards.messages import MAX_ANSWER_CHARACTERS, RewardSpec, Score
from megagrpo.rewards.reward import REWARDS, ScoreFunction, build_registered
from megagrpo.types import Completion, Prompt

for _module in (
    *("math", "format", "exact_match", "choice", "code", "style"),
    *("judge", "reward_model"),
):  # each registers its reward
    importlib.import_module(f"megagrpo.rewards.{_module}")


class Scorer(Protocol):
    """Scores the completions of a prompt by one reward."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        """Return one score per completion."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise UserError where a column that the reward reads is not among `columns`."""


def is_custom(name: str) -> bool:
    """Return whether `name` is the name of a user's function, which is called with all completions of a
    prompt at once.
    """
    return name not in REWARDS.names() and is_code_place(name)


def takes_groups(name: str) -> bool:
    """Return whether a reward is called with all completions of a prompt at once."""
    return is_custom(name) or (name in REWARDS.names() and getattr(REWARDS.get(name), "scores_groups", False))


def build_scorer(spec: RewardSpec) -> Scorer:
    """Return the function that scores completions by this reward, warmed up.

    Raises:
        UserError: the reward is unknown, can't be loaded or refuses its options; later, the scorer raises it
            for a mistake that ends the run. What else a scorer raises is the failure of these completions
            alone.
    """
    if is_custom(spec.name):
        return CustomReward(spec.name, spec.options)
    score = build_registered(spec.name, spec.options)
    if hasattr(score, "warm_up"):
        score.warm_up()
    return _RegisteredReward(spec.name, score)


class _RegisteredReward:
    """A registered reward over several completions, one after the other."""

    def __init__(self, name: str, score: ScoreFunction):
        self._name, self._score = name, score

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        if hasattr(self._score, "score_group"):
            return [self._checked(value) for value in self._score.score_group(prompts, completions)]
        return [self._judge(*pair) for pair in zip(prompts, completions, strict=True)]

    def _judge(self, prompt: Prompt, completion: Completion) -> Score:
        judge = getattr(self._score, "judge", None)
        value, answer = judge(prompt, completion) if judge else (self._score(prompt, completion), None)
        if answer is not None:  # half a surrogate pair, which tokens may spell, can't be sent
            answer = answer[:MAX_ANSWER_CHARACTERS].encode(errors="replace").decode()
        return self._checked(value, answer)

    @staticmethod
    def _checked(value: float, answer: str | None = None) -> Score:
        if not isfinite(value):
            raise ValueError(f"returned {value}, not a finite number")
        return Score(float(value), answer=answer)

    def check_columns(self, columns: Collection[str]) -> None:
        column = getattr(self._score, "column", None)
        if column is not None and column not in columns:
            raise UserError(
                f"reward {self._name!r}: there is no column {column!r}; the columns: "
                f"{', '.join(columns) or 'none'}"
            )
