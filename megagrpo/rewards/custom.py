"""A user's own reward: a batch function named by `FILE.py:function` or `package.module:function`."""

import functools
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.errors import UserError
from megagrpo.registry import load_callable
from megagrpo.rewards.reward import BatchFunction
from megagrpo.types import Completion, Prompt


def load_custom(spec: str, options: Mapping[str, Any]) -> BatchFunction:
    """Return the function that `spec` names, with `options` bound as keyword arguments; raises UserError
    where it can't be loaded.
    """
    return functools.partial(load_callable(spec), **options)


def call_custom(
    spec: str, function: BatchFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[float]:
    """Call a user's reward on the completions of one prompt and check what it returns.

    Args:
        spec: the name in the configuration, for messages.
        function: `reward(prompts, completions) -> list[float]`.
        prompts: the prompt, once per completion.
        completions: its completions.

    Raises:
        UserError: the function raised, returned something else than one number per completion, or a number
            that is not finite. The message names the function, the prompt and the line.
    """
    place = f"reward {spec!r}, prompt {prompts[0].id}"
    try:
        returned = function(list(prompts), list(completions))
    except (Exception, SystemExit) as error:
        # user code may raise anything; all of it becomes one line that names where
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{place}: raised {reason} ({frame.filename}, line {frame.lineno}: {frame.line})"
        ) from error
    try:
        values = [float(value) for value in returned]
    except (TypeError, ValueError):
        shown = repr(returned)
        raise UserError(
            f"{place}: returned {shown[:80]} ({type(returned).__name__}); a list of numbers is needed"
        ) from None
    if len(values) != len(completions):
        raise UserError(f"{place}: returned {len(values)} values for {len(completions)} completions")
    for completion, value in zip(completions, values, strict=True):
        if not math.isfinite(value):
            raise UserError(
                f"{place}: returned {value} for completion {completion.index}; a finite number is needed"
            )
    return values
