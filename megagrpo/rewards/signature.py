"""How a user's reward is called: by name, never by position."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.errors import UserError

CONTRACT = (
    "a reward is called by name: reward(prompts, completions, COLUMN, ..., **rest), lists of equal length; "
    "it returns a list with one number, None or mapping of parts for each completion"
)
GIVEN = ("prompts", "completions", "completion_ids")  # beside the columns of the data and the options
_EMPTY, _REST = inspect.Parameter.empty, inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True)
class CallForm:
    """The parameters of a reward that are not options."""

    required: tuple[str, ...]  # no default
    optional: tuple[str, ...]  # a column by this name takes the place of the default
    takes_rest: bool  # **kwargs: every other column

    def arguments(self, given: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call.

        Args:
            given: values for the names in `GIVEN`.
            columns: values of the data's columns, every required parameter among them.
        """
        arguments = {name: given[name] if name in given else columns[name] for name in self.required}
        everything = {**columns, **given}
        arguments |= {name: everything[name] for name in self.optional if name in everything}
        return {**everything, **arguments} if self.takes_rest else arguments


def read_signature(spec: str, function: Callable[..., Any], options: Iterable[str]) -> CallForm:
    """Return how `function` is called where `options` are bound already.

    Raises:
        UserError: it can't be called as the contract says, or has no parameter for an option.
    """
    place, bound = f"reward {spec!r}", set(options)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UserError(f"{place}: its parameters can't be read; {CONTRACT}") from None
    shown = f"({', '.join(map(str, parameters.values()))})"
    takes_rest = any(parameter.kind is _REST for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if "solution_str" in named:
        raise UserError(
            f"{place}: {shown} is verl's form, one completion a call; wrap it: "
            "def reward(completions, answer, **rest): "
            "return [compute_score('', text, gold) for text, gold in zip(completions, answer)]"
        )
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"{place}: {shown}: {name!r} can't be given by name; {CONTRACT}")
    if "completions" not in named and not takes_rest:
        raise UserError(f"{place}: {shown} has no parameter `completions`; {CONTRACT}")
    for option in sorted(bound):
        if option in GIVEN or (option not in named and not takes_rest):
            allowed = [name for name in named if name not in GIVEN]
            raise UserError(
                f"{place}: option {option!r} is no parameter that an option can set; those are: "
                f"{', '.join(allowed) or 'none'}"
            )
    free = {name: parameter.default for name, parameter in named.items() if name not in bound}
    return CallForm(
        tuple(name for name, default in free.items() if default is _EMPTY),
        tuple(name for name, default in free.items() if default is not _EMPTY),
        takes_rest,
    )
