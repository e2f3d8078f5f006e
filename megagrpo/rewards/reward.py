"""The contract of a reward and the table of registered ones."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megagrpo.errors import UserError
from megagrpo.registry import Registry, suggestion
from megagrpo.types import Completion, Prompt

ScoreFunction = Callable[[Prompt, Completion], float]
"""`score(prompt, completion) -> float`, finite. It may raise TimeoutError for a time-out of its own, and
UserError for a mistake in the data that makes every score meaningless (a missing column). Anything else it
raises counts as an `error` of that one completion."""

REWARDS: Registry[Callable[..., ScoreFunction]] = Registry("reward")
"""Factories by name: `REWARDS.get(name)(**options) -> ScoreFunction`. A factory checks its options and raises
UserError. Where the score function has a method `warm_up()`, the worker calls it once, so that first-use
costs do not count against the first completion. Where it has a method `judge(prompt, completion) -> (score,
answer)`, this is called in its place; majority votes count the answers: text that is equal for equal ones, ""
for none. One with `score_group(prompts, completions)`, and `scores_groups` at its class, is called with all
completions of a prompt. The column that it reads, where it does, is its attribute `column`: data without it
is refused before anything is scored."""


def build_registered(name: str, options: Mapping[str, Any]) -> ScoreFunction:
    """Return the score function that the factory `name` makes from `options`.

    Raises:
        UserError: the name is not registered, an option is unknown or missing, or the factory refuses a
            value.
    """
    factory = REWARDS.get(name)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UserError(
            f"rewards.functions: options of {name!r}: {error}; options: {', '.join(signature.parameters)}"
        ) from None
    return factory(**options)


def read_column(prompt: Prompt, column: str, reward: str) -> Any:
    """Return `prompt.columns[column]`; a missing column raises UserError, because then no completion of
    the data set can be scored.
    """
    if column in prompt.columns:
        return prompt.columns[column]
    known = ", ".join(map(str, prompt.columns)) or "none"
    near = suggestion(column, list(map(str, prompt.columns)))
    raise UserError(
        f"reward {reward!r}: prompt {prompt.id} has no column {column!r}{near}; its columns: {known}"
    )


def check_choice(reward: str, option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UserError where an option's value is not one of the allowed ones."""
    if value not in allowed:
        raise UserError(
            f"rewards.functions: {reward!r}: {option} is {value!r}; allowed: {', '.join(allowed)}"
        )
