r"""What a number is: the grammar of plain numbers, read exactly.

number   = [sign] [currency] [sign] amount [scale] [unit] | amount "%"
amount   = integer [" "] fraction | fraction | decimal [exponent] | "10^" integer
decimal  = digits ["." digits] | "." digits      digits may stand in groups of three, with "," or " " between
fraction = integer "/" integer | \frac{decimal}{decimal}
exponent = "e" integer | ("*", "x", "\times", "\cdot") "10^" integer
scale    = "k" | "hundred" | "thousand" | "million" | "billion" | "trillion"
unit     = words without digits
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_EXPONENT = 400  # beyond it a number is no answer that anyone expects, and only costs memory

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+|\d+\.(?!\d))"
_FRACTION = rf"(?:\d+\s*/\s*\d+(?!\s*/|\d|\.\d)|\\frac\s*\{{\s*-?{_DECIMAL}\s*\}}\s*\{{\s*-?{_DECIMAL}\s*\}})"
_POWER = r"(?:10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|\(\s*[-+]?\d+\s*\)|[-+]?\d+))"
_AMOUNT = (
    rf"(?:(?P<whole>\d+)\s*(?P<mixed>\\frac\s*\{{\s*\d+\s*\}}\s*\{{\s*\d+\s*\}})"
    rf"|(?P<whole2>\d+)\s+(?P<mixed2>\d+\s*/\s*\d+)(?!\s*/|\d|\.\d)"
    rf"|(?P<fraction>{_FRACTION})"
    rf"|(?P<power>{_POWER})"
    rf"|(?P<decimal>{_DECIMAL})"
    rf"(?:[eE](?P<exponent>[-+]?\d+)(?!\d|\.\d)|\s*(?:\*|x|\\times|\\cdot)\s*(?P<times>{_POWER}))?)"
)
_CURRENCY = r"(?:\$|€|£|¥|₹|USD\s|US\$)"
_SIGN = r"[-+]"
NUMBER = re.compile(
    rf"(?:(?P<sign>{_SIGN})\s*)?(?:(?P<money>{_CURRENCY})\s*)?(?:(?P<sign2>{_SIGN})\s*)?{_AMOUNT}"
)
_SCALES = {
    "k": 3,
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
}
_PERCENT = re.compile(r"\s*(?:%|per ?cent\b)")
_EXPRESSION_BEFORE = re.compile(r"(?:[\^_√]\{?|\\(?!boxed|fbox|times|cdot)[A-Za-z]+\s*\{?)\s*$")
_EXPRESSION_AFTER = re.compile(r"\s*(?:\^|\\(?:sqrt|pi|frac)\b)|!(?=[\w)])")
_SCALE = re.compile(
    r"\s*(?:(k)(?![A-Za-z])|-?\s*(hundred|thousand|million|billion|trillion)s?\b)", re.IGNORECASE
)
_UNIT_EXPONENT = re.compile(r"(?<=[A-Za-zµμ])\s*\^\s*\{?-?[123]\}?")  # m^2
_UNIT = re.compile(r"[\s-]*[A-Za-z°€£¥₹¢$µμ(][A-Za-z°€£¥₹¢$µμ'./,()\s-]*")
_MAX_UNIT_WORDS = 6
# words that change what is said
_NO_UNIT = re.compile(
    r"\b(?:or|and|nor|not|to|than|minus|plus|times(?=\s*\w)|divided|over|pi|sqrt|if|but|rather|instead|between|half"
    r"|quarter|remainder)\b|^\W*(?:squared|cubed|factorial)\b",
    re.IGNORECASE,
)
# Units that measure: two of them that differ make two different answers. Others name what is counted.
_MEASURES = {
    synonym: name
    for name, synonyms in {
        "dollar": "$ dollar usd",
        "cent": "cent ¢",
        "euro": "€ euro eur",
        "pound sterling": "£ gbp",
        "m": "m meter metre",
        "cm": "cm centimeter centimetre",
        "mm": "mm millimeter millimetre",
        "km": "km kilometer kilometre",
        "inch": "inch inche",
        "foot": "ft foot feet",
        "yard": "yd yard",
        "mile": "mi mile",
        "g": "g gram",
        "kg": "kg kilogram",
        "pound": "lb pound",
        "ounce": "oz ounce",
        "second": "s sec second",
        "minute": "min minute",
        "hour": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "year yr",
        "liter": "l liter litre",
        "ml": "ml milliliter millilitre",
        "degree": "° degree deg",
        "radian": "rad radian",
        "a.m.": "am a.m",
        "p.m.": "pm p.m",
    }.items()
    for synonym in synonyms.split()
}


@dataclass(frozen=True)
class Number:
    """A plain number, as written."""

    value: Fraction
    step: Fraction = Fraction(0)  # one in its last decimal place; 0 where it is written without a point
    is_percent: bool = False
    measure: str = ""  # the unit, where it measures

    def readings(self) -> tuple[Fraction, ...]:
        """Return what the number may mean: `50%` is 50 of a hundred, and a half."""
        return (self.value, self.value / 100) if self.is_percent else (self.value,)

    @property
    def is_rounded(self) -> bool:
        """Whether it may stand for a number with more decimals."""
        return self.step > 0


def read_number(text: str) -> Number | None:
    """Return the number that the whole of `text` (normalised) is, with or without a unit."""
    match = NUMBER.match(text)
    return None if match is None else _finish(match, text[match.end() :])


def read_leading_number(text: str) -> tuple[Number, str] | None:
    """Return the number that `text` (normalised) begins with, and what follows it."""
    match = NUMBER.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    taken = _PERCENT.match(rest) or _SCALE.match(rest)
    number = _finish(match, taken[0] if taken else "")
    return None if number is None else (number, rest[taken.end() :] if taken else rest)


def find_numbers(text: str) -> Iterator[Number | None]:
    """Yield every number in `text` (normalised), from left to right; None where it is a part of a larger
    expression.
    """
    for match in NUMBER.finditer(text):
        if _EXPRESSION_BEFORE.search(
            text, max(0, match.start() - 12), match.start()
        ) or _EXPRESSION_AFTER.match(text, match.end()):
            yield None
            continue
        rest = text[match.end() : match.end() + 16]
        taken = _PERCENT.match(rest) or _SCALE.match(rest)
        number = _finish(match, taken[0] if taken else "")
        if number is not None and match["sign"] == "-" and _is_operator(text, match):
            number = replace(number, value=-number.value)
        yield number


def _is_operator(text: str, match: re.Match[str]) -> bool:
    """Return whether the sign of a match stands between two things (`10-5`, `x - 5`), not before one (`is
    -5`).
    """
    before = text[max(0, match.start() - 40) : match.start()]
    last = before.rstrip()[-1:]
    if before[-1:] == last or match[0][1:2].isspace():
        return last.isalnum() or last in tuple(")]}%")
    return last.isdigit() or last in tuple(")]}%")


def same_number(first: Number, second: Number, tolerance: Fraction) -> bool:
    """Return whether two numbers are equal: exactly where both are written as integers or fractions.

    A decimal also equals what it may be rounded or cut off from: what differs by less than one in its last
    place, and by no more than `tolerance` relative to the larger one.
    """
    if first.measure and second.measure and first.measure != second.measure:
        return False
    if first.is_percent and second.is_percent:
        return _is_near(first.value, second.value, max(first.step, second.step), tolerance)
    return any(
        _is_near(a, b, max(first.step, second.step), tolerance)
        for a in first.readings()
        for b in second.readings()
    )


def _is_near(a: Fraction, b: Fraction, step: Fraction, tolerance: Fraction) -> bool:
    return a == b or (abs(a - b) < step and abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _finish(match: re.Match[str], rest: str) -> Number | None:
    """Return the number of a match with `rest`, which must be a scale, a percent sign or a unit."""
    read = _read_amount(match)
    if read is None:
        return None
    value, step = read
    if scale := _SCALE.match(rest):
        factor = 10 ** _SCALES[(scale[1] or scale[2]).lower()]
        value, step = value * factor, step * factor
        rest = rest[scale.end() :]
    percent = _PERCENT.match(rest)
    if percent:
        rest = rest[percent.end() :]
    unit = _UNIT_EXPONENT.sub("", rest).rstrip()
    word = unit.lower().strip(" .-()")
    if unit and (
        _UNIT.fullmatch(unit) is None
        or _NO_UNIT.search(unit)
        or len(unit.split()) > _MAX_UNIT_WORDS
        or (len(word) == 1 and word not in _MEASURES)  # 5x is a product
    ):
        return None
    money = (match["money"] or "").strip()
    measure = _MEASURES.get(money) or _MEASURES.get(word) or _MEASURES.get(word.removesuffix("s"), "")
    if (match["sign"] == "-") != (match["sign2"] == "-"):
        value = -value
    return Number(value, step, percent is not None, measure)


def _read_amount(match: re.Match[str]) -> tuple[Fraction, Fraction] | None:
    """Return (value, one in its last decimal place)."""
    try:
        for whole, mixed in (("whole", "mixed"), ("whole2", "mixed2")):
            if match[whole]:
                part = _read_fraction(match[mixed])
                return (int(match[whole]) + part, Fraction(0)) if part < 1 else None
        if match["fraction"]:
            return _read_fraction(match["fraction"]), Fraction(0)
        if match["power"]:
            return _read_power(match["power"]), Fraction(0)
        digits = match["decimal"].replace(",", "").replace(" ", "").rstrip(".")
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT or len(digits) > MAX_EXPONENT:
            return None
        factor = Fraction(10) ** exponent * (_read_power(match["times"]) if match["times"] else 1)
        places = len(digits.partition(".")[2])
        return Fraction(digits) * factor, Fraction(1, 10**places) * factor if places else Fraction(0)
    except (ZeroDivisionError, ValueError, OverflowError):
        return None


def _read_fraction(text: str) -> Fraction:
    above, below = re.findall(r"-?[\d.,]+", text)
    return Fraction(above.replace(",", "")) / Fraction(below.replace(",", ""))


def _read_power(text: str) -> Fraction:
    exponent = int(re.findall(r"[-+]?\d+", text)[-1])
    if abs(exponent) > MAX_EXPONENT:
        raise OverflowError
    return Fraction(10) ** exponent
