"""Equality of two expressions by math-verify (SymPy). Imported by the `math` reward alone: it costs about a
second.

math-verify's limits use SIGALRM, so this works in a process's main thread only: the reward workers'.
"""

from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# derives from BaseException: `except Exception` does not see it
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Expr

# math-verify's own limits in whole seconds. Two parses and a comparison stay below the default outer limit of
# 10 s, so that an expression that never ends is named without the cost of a new worker; the outer, killing
# limit catches what an alarm can't stop.
PARSE_SECONDS, COMPARE_SECONDS = 2, 4
# Where two constants are equal, their difference in 30 digits is rounding alone.
_EXACT_TOLERANCE = 1e-20


def is_same_expression(gold: str, answer: str, tolerance: Fraction) -> bool:
    """Return whether the LaTeX `answer` is equal to the LaTeX `gold`.

    Args:
        tolerance: relative, between constants.

    Raises:
        ValueError: `gold` can't be parsed.
        TimeoutError: parsing or comparing took too long.
    """
    expected = _parse(gold)
    if expected is None:
        raise ValueError(f"gold answer {gold[:80]!r} can't be parsed")
    given = _parse(answer)
    if given is None:
        return False
    try:
        if _is_constant(expected) and _is_constant(given):
            return bool(timeout(COMPARE_SECONDS)(_is_same_constant)(expected, given, float(tolerance)))
        return verify([expected], [given], timeout_seconds=COMPARE_SECONDS, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"comparing took over {COMPARE_SECONDS} s") from error
    except Exception:
        # a nonsensical answer can make SymPy raise almost anything: such an answer is wrong, not a failure of
        # the scorer
        return False


@lru_cache(maxsize=4096)  # a group's completions share their gold answer
def _parse(latex: str) -> Any:
    try:
        parsed = parse(f"${latex}$", parsing_timeout=PARSE_SECONDS, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"parsing took over {PARSE_SECONDS} s") from error
    except Exception:  # the same reason: no parse is no answer
        return None
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def _is_constant(value: Any) -> bool:
    return isinstance(value, Expr) and bool(value.is_number)


def _is_same_constant(first: Any, second: Any, tolerance: float) -> bool:
    """Compare by size, never by an absolute difference: 1e-8 and 2e-8 differ."""
    if first == second:
        return True
    a, b = first.evalf(30), second.evalf(30)
    if not (a.is_finite and b.is_finite):
        return False
    return abs(a - b) <= max(tolerance, _EXACT_TOLERANCE) * max(abs(a), abs(b))
