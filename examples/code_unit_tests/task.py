"""Small functions to write in Python: descriptions, unit tests that the model never sees, a held-out split.

The prompt shows two solved descriptions and begins the third function; the model ends its `return` line. The
reward `code` runs what comes out against the tests.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

# description, what it is: {k} is a number of one digit
FORMS = {
    "a plus b, minus {k}": lambda a, b, k: a + b - k,
    "a minus b, plus {k}": lambda a, b, k: a - b + k,
    "a times {k}, plus b": lambda a, b, k: a * k + b,
    "{k} times the sum of a and b": lambda a, b, k: k * (a + b),
    "the larger of a and b, plus {k}": lambda a, b, k: max(a, b) + k,
    "the smaller of a and b, minus {k}": lambda a, b, k: min(a, b) - k,
    "the distance of a and b, plus {k}": lambda a, b, k: abs(a - b) + k,
    "the square of a, plus {k}": lambda a, b, k: a**2 + k,
    "the remainder of a divided by {k}": lambda a, b, k: a % k,
    "whether a is larger than {k}": lambda a, b, k: a > k,
    "whether b is equal to {k}": lambda a, b, k: b == k,
    "a if b is larger than {k}, else b": lambda a, b, k: a if b > k else b,
}
SHOTS = """# the product of a and b, minus 1
def f(a, b):
    return a * b - 1

# the larger of a and 2
def f(a, b):
    return max(a, 2)

"""
NUM_TESTS = 6


def build_row(form: str, k: int) -> dict[str, Any]:
    """Return a row: the prompt, and calls with what they must return."""
    description = form.format(k=k)
    draw = random.Random(description)  # the same tests in every process
    pairs = [(draw.randint(-20, 20), draw.randint(-20, 20)) for _ in range(NUM_TESTS - 2)] + [(7, k), (k, 7)]
    tests = [{"call": "f", "args": [a, b], "want": FORMS[form](a, b, k)} for a, b in pairs]
    return {"prompt": f"{SHOTS}# {description}\ndef f(a, b):\n    return", "tests": tests}


def is_held_out(form: str, k: int) -> bool:
    """Return whether a description is for the evaluation: one in five, by a hash of it."""
    return hashlib.sha256(form.format(k=k).encode()).digest()[0] % 5 == 0


def train_rows() -> Iterator[dict[str, Any]]:
    """Yield the rows to train on."""
    return (build_row(*place) for place in product(FORMS, range(2, 10)) if not is_held_out(*place))


def eval_rows() -> Iterator[dict[str, Any]]:
    """Yield the held-out rows."""
    return (build_row(*place) for place in product(FORMS, range(2, 10)) if is_held_out(*place))
