"""Mathematical equality of two texts by math-verify (SymPy). Imported by the `math` reward alone: it costs
about a second.

math-verify's limits use SIGALRM, so this works in a process's main thread only: the reward workers'.
"""

from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# derives from BaseException: `except Exception` does not see it
from math_verify.errors import TimeoutException

# math-verify's own limits in whole seconds. Two parses and a comparison stay below the default outer limit of
# 10 s, so that an expression that never ends is named without the cost of a new worker; the outer, killing
# limit catches what an alarm can't stop.
PARSE_SECONDS, COMPARE_SECONDS = 2, 4


def is_equal(gold: str, answer: str) -> bool:
    """Return whether the answer that `answer` contains is equal to `gold`.

    Args:
        gold: the expected answer alone, LaTeX or plain, with or without dollar signs.
        answer: text to search for an answer: anchored ones first ("the answer is"), then the last expression.

    Raises:
        ValueError: `gold` can't be parsed.
        TimeoutError: parsing or comparing took too long.
    """
    expected = _parse_gold(gold)
    given = _parse(answer)
    try:
        return verify(list(expected), list(given), timeout_seconds=COMPARE_SECONDS, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"comparing took over {COMPARE_SECONDS} s") from error
    except Exception:
        # a nonsensical answer can make SymPy raise almost anything: such an answer is wrong, not a failure of
        # the scorer
        return False


def _parse(text: str) -> tuple[Any, ...]:
    try:
        return tuple(parse(text, parsing_timeout=PARSE_SECONDS, raise_on_error=True))
    except TimeoutException as error:
        raise TimeoutError(f"parsing took over {PARSE_SECONDS} s") from error
    except Exception:  # the same reason: no parse is no answer
        return ()


@lru_cache(maxsize=4096)  # a group's completions share their gold answer
def _parse_gold(text: str) -> tuple[Any, ...]:
    parsed = _parse(as_formula(text)) or _parse(text)
    if not parsed:
        raise ValueError(f"gold answer {text[:80]!r} can't be parsed")
    return parsed


def as_formula(text: str) -> str:
    """Return `text` between dollar signs: bare LaTeX is parsed only inside them."""
    return f"${text.strip().strip('$')}$"
