"""What an answer can be, and when two answers are equal."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from megagrpo.rewards.numbers import Number, same_number

SameExpression = Callable[[str, str, Fraction], bool]  # (gold, answer, relative tolerance), LaTeX


@dataclass(frozen=True)
class Words:
    """An answer that is text: a name, yes or no, a choice, a date, a time, a ratio."""

    text: str


@dataclass(frozen=True)
class Collection:
    """Several values; without brackets, or in braces, their order says nothing."""

    opening: str
    closing: str
    items: tuple["Value", ...]


@dataclass(frozen=True)
class Assignment:
    """`x = value`."""

    name: str
    value: "Value"


@dataclass(frozen=True)
class Expression:
    """LaTeX that none of the others is."""

    latex: str


Value = Number | Words | Collection | Assignment | Expression
_RELATION = re.compile(r"\s*(?:[<>]|\\(?:leq?|geq?|neq?|lt|gt)\b)")


def is_same(gold: Value, answer: Value, tolerance: Fraction, same_expression: SameExpression) -> bool:
    """Return whether an answer equals the gold one.

    Args:
        tolerance: relative, of numbers that are written with a decimal point.
        same_expression: judges what is more than numbers, words and collections of them.
    """
    if isinstance(gold, Assignment) or isinstance(answer, Assignment):
        names = {side.name for side in (gold, answer) if isinstance(side, Assignment)}
        values = [side.value if isinstance(side, Assignment) else side for side in (gold, answer)]
        return len(names) == 1 and is_same(values[0], values[1], tolerance, same_expression)
    if isinstance(gold, Number) and isinstance(answer, Number):
        return same_number(gold, answer, tolerance)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return gold == answer
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        return _is_same_collection(gold, answer, tolerance, same_expression)
    sides = (gold, answer)
    if any(isinstance(side, Number) for side in sides) and any(map(_is_many, sides)):
        return False  # `5 or more` is not 5
    is_rounded = any(_has_decimals(side) for side in (gold, answer))
    return same_expression(as_latex(gold), as_latex(answer), tolerance if is_rounded else Fraction(0))


def _is_many(value: Value) -> bool:
    is_relation = isinstance(value, Expression) and _RELATION.match(value.latex) is not None
    return is_relation or isinstance(value, Collection)


def _has_decimals(value: Value) -> bool:
    if isinstance(value, Number):
        return value.is_rounded
    return re.search(r"\.\d", as_latex(value)) is not None


def as_latex(value: Value) -> str:
    """Return a value as LaTeX."""
    match value:
        case Number():
            above, below = value.value.numerator, value.value.denominator
            return str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"
        case Collection():
            return value.opening + ",".join(map(as_latex, value.items)) + value.closing
        case Assignment():
            return f"{value.name}={as_latex(value.value)}"
        case Words():
            return rf"\text{{{value.text}}}"
        case Expression():
            return value.latex


def _is_same_collection(
    gold: Collection, answer: Collection, tolerance: Fraction, same_expression: SameExpression
) -> bool:
    def is_same_item(first: Value, second: Value) -> bool:
        return is_same(first, second, tolerance, same_expression)

    if len(gold.items) != len(answer.items):
        return False
    if gold.opening in ("(", "[") or answer.opening in ("(", "["):
        if (
            gold.opening
            and answer.opening
            and (gold.opening, gold.closing) != (answer.opening, answer.closing)
        ):
            return False
        return all(map(is_same_item, gold.items, answer.items))
    left = list(answer.items)
    for item in gold.items:
        match_ = next((other for other in left if is_same_item(item, other)), None)
        if match_ is None:
            return False
        left.remove(match_)
    return True
