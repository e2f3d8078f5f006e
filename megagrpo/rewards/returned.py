"""Reads what a user's reward returns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from megagrpo.errors import UserError
from megagrpo.rewards.messages import Score

_ALLOWED = "a number, None (no opinion) or a mapping of parts"


def read_scores(place: str, returned: Any, indices: Sequence[int]) -> list[Score]:
    """Return the scores in `returned`.

    Args:
        place: which reward and prompt, for messages.
        returned: one entry per completion; arrays and tensors count as lists. A number is the score, None no
            opinion, a mapping of numbers the parts of the score: their sum, or `score` where that is one of
            them.
        indices: of the completions, for messages.

    Raises:
        UserError: it is anything else. Text is never read as a number.
    """
    entries = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(entries, Iterable) or isinstance(entries, (str, bytes, Mapping)):
        raise UserError(
            f"{place}: returned {repr(returned)[:80]} ({type(returned).__name__}); a list with one entry per "
            "completion is needed"
        )
    entries = list(entries)
    if len(entries) != len(indices):
        raise UserError(f"{place}: returned {len(entries)} values for {len(indices)} completions")
    return [
        _read(f"{place}, completion {index}", entry) for index, entry in zip(indices, entries, strict=True)
    ]


def _read(place: str, entry: Any) -> Score:
    if entry is None:
        return Score(None)
    if not isinstance(entry, Mapping):
        return Score(_number(place, entry))
    parts = {str(name): _number(f"{place}, part {name!r}", part) for name, part in entry.items()}
    if not parts:
        raise UserError(f"{place}: returned an empty mapping; {_ALLOWED} is needed")
    value = parts.pop("score") if "score" in parts else sum(parts.values())
    return Score(value, parts)


def _number(place: str, entry: Any) -> float:
    value = entry.item() if hasattr(entry, "item") else entry  # NumPy's and torch's scalars
    if not isinstance(value, Real):
        raise UserError(
            f"{place}: returned {repr(entry)[:80]} ({type(entry).__name__}); {_ALLOWED} is needed"
        )
    if not math.isfinite(value):
        raise UserError(f"{place}: returned {value}; a finite number is needed")
    return float(value)
