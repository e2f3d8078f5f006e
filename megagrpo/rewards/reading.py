"""Reads what an answer says: a number, words, a list, tuple, set or interval, an assignment, or an
expression for math-verify.
"""

import re
from collections import deque
from dataclasses import replace
from functools import lru_cache

from megagrpo.rewards.notation import MAX_ANSWER_CHARACTERS, normalise
from megagrpo.rewards.numbers import Number, find_numbers, read_leading_number, read_number
from megagrpo.rewards.values import Assignment, Collection, Expression, Value, Words

_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w+\}?|')?|\\[a-z]+)\s*(?:=|:=|\\approx|≈)\s*([^=<>]+)")
_ARITHMETIC = re.compile(r"[-+*/().,\d\s^{}$%]*(?:\\(?:times|cdot|frac|div)[-+*/().,\d\s^{}$%]*)*=\s*([^=]+)")
_LITERAL = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d+:\d+(?::\d+)?\s*(?:[ap]\.?\s?m\.?)?"
    r"|\d[\dA-F]*_\{?\d+\}?",  # 52_8 is to the base 8
    re.IGNORECASE,
)
_WORDS = re.compile(r"\(?[^\W\d_]+(?:[\s'.,-]+[^\W\d_]+)*\)?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}")
_FUNCTIONS = frozenset(
    [
        *["pi", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "arcsin", "arccos"],
        *["arctan", "sinh", "cosh", "tanh", "inf", "infinity", "mod", "gcd", "lcm", "min", "max"],
    ]
)
_NEGATION = re.compile(
    r"\b(?:not|never|no|but|except|without|neither|nor|instead|rather|than|least|most|under|over|above|below"
    r"|between|up to|minimum|maximum)\b|n't\b",
    re.IGNORECASE,
)
# after a number: it is a part of something larger
_GOES_ON = re.compile(r"\s*(?:[-+*/^=<>!\\{]|\(\s*(?:or\b|and\b|[-+\d])|,?\s*(?:or|and|to)\b|,\s*\S?\d)")
_SEPARATOR = re.compile(r"\s*(?:,\s*(?:and|or)\b|;|,(?!\d{3}(?!\d))|,(?=\s)|\b(?:and|or)\b)\s*")
_MAX_DEPTH = 20  # braces inside each other
_BRACKETS = {"(": ")]", "[": ")]", r"\{": (r"\}",)}


@lru_cache(maxsize=8192)  # a group's completions share their gold answer, and often their answers
def read_value(text: str) -> Value | None:
    """Return what `text` says, or None where it is empty, too long, or prose."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    plain = normalise(text)
    return _read(plain) if plain else None


def read_marked(text: str) -> Value | None:
    """Return what a marked text says: its value, or the one number of a short sentence."""
    value = read_value(text)
    if value is not None or len(text) > MAX_ANSWER_CHARACTERS:
        return value
    plain = normalise(text)
    numbers = list(find_numbers(plain))
    return numbers[0] if len(numbers) == 1 and _NEGATION.search(plain) is None else None


def read_statement(text: str) -> Value | None:
    """Return what a sentence like `72 clips, because ...` says: the whole where it is a value, else the
    number that it begins with.
    """
    text = text[:MAX_ANSWER_CHARACTERS]
    whole = read_marked(text)
    if whole is not None and not isinstance(whole, Expression):
        return whole
    found = read_leading_number(normalise(text))
    if found is None or _GOES_ON.match(found[1]):
        return whole
    rest = found[1].strip()
    is_product = len(rest) < 3 and re.match(r"[A-Za-z](?![A-Za-z])", rest) is not None
    return whole if is_product else found[0]


def last_number(text: str) -> Number | None:
    """Return the last number of a text, None where there is none or it is a part of an expression."""
    last = deque(find_numbers(normalise(text.replace(r"\boxed{", " ").replace(r"\fbox{", " "))), maxlen=1)
    return last[0] if last else None


def _read(text: str) -> Value | None:
    number = read_number(text)
    if number is not None:
        return number
    if _LITERAL.fullmatch(text):
        return Words(re.sub(r"[\s.{}]", "", re.sub(r"(?<!\d)0+(?=\d)", "", text)).casefold())
    if match := _ASSIGNMENT.fullmatch(text):
        value = _read(match[2].strip())
        return None if value is None else Assignment(match[1], value)
    if match := _ARITHMETIC.fullmatch(text):
        return _read(match[1].strip())
    if words := _read_words(text):
        return words
    if collection := _read_collection(text):
        return collection
    prose = [word for word in _WORD.findall(_ENVIRONMENT.sub(" ", text)) if word.lower() not in _FUNCTIONS]
    if len(prose) >= 2 or any(len(word) > 3 for word in prose):
        return None
    is_readable = _is_balanced(text) and re.search(r"\d\s+\d", text) is None  # `7 2` is no product
    return Expression(text) if is_readable else None


def _read_words(text: str) -> Words | None:
    """Return words, where `text` is nothing else and not a product of letters or a function."""
    if _WORDS.fullmatch(text) is None:
        return None
    bare = text.strip("()")
    if len(bare) == 1:
        return Words(bare)
    if re.search(r"[^\W\d_]{2}", bare) is None:
        return None  # p-q
    words = " ".join(bare.split())
    if words.split()[0].lower() in _FUNCTIONS or (len(words) == 2 and words.lower() != "no"):
        return None
    if re.search(r",|\b(?:and|or)\b", words):
        return None  # a list
    return Words(words.casefold())


def _read_collection(text: str) -> Collection | None:
    for opening, closings in _BRACKETS.items():
        closing = next((closing for closing in closings if text.endswith(closing)), None)
        if text.startswith(opening) and closing and _is_one_bracket(text, opening):
            inside = text[len(opening) : -len(closing)]
            items = _split(inside, is_bracketed=True)
            if len(items) == 1 and opening == "(" and closing == ")":
                return None
            return _build(opening, closing, items)
    if text.startswith(r"\pm"):
        value = _read(text.removeprefix(r"\pm").strip())
        if isinstance(value, Number):
            return Collection("", "", (value, replace(value, value=-value.value)))
        return None
    items = _split(text, is_bracketed=False)
    return _build("", "", items) if len(items) > 1 else None


def _build(opening: str, closing: str, texts: list[str]) -> Collection | None:
    values = [_read(text) if text else None for text in texts]
    items = tuple(value for value in values if value is not None)
    return Collection(opening, closing, items) if items and len(items) == len(values) else None


def _is_one_bracket(text: str, opening: str) -> bool:
    """Return whether the bracket that `text` begins with closes at its end."""
    depth = 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return position == len(text) - 1
    return False


def _split(text: str, is_bracketed: bool) -> list[str]:
    """Return the items between separators that no bracket encloses; in brackets every comma separates."""
    items, start, position, depth = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0:
            if is_bracketed and character == ",":
                items.append(text[start:position])
                start = position + 1
            elif (match := _SEPARATOR.match(text, position)) and _separates(match, start):
                items.append(text[start:position])
                start = position = match.end()
                continue
        position += 1
    return [item.strip() for item in [*items, text[start:]]]


def _separates(match: re.Match[str], start: int) -> bool:
    """Return whether a separator stands between two items; a word (`and`) needs one before it."""
    mark = match[0].strip()
    return mark[:1] in (",", ";") or (bool(mark) and match.start() > start)


def _is_balanced(text: str) -> bool:
    """Return whether every brace closes, and none lies deeper than an answer needs."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if not 0 <= depth <= _MAX_DEPTH:
            return False
    return depth == 0
