"""Properties of reward `math` over numbers that hypothesis draws: however a number is written it is the same
number, and two numbers that differ are never equal. Values are Python's exact fractions.
"""

from decimal import Decimal
from fractions import Fraction

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megagrpo.rewards.math import MathReward
from megagrpo.types import Completion, Prompt

REWARD = MathReward()
INTEGERS = st.integers(-(10**9), 10**9)
DECIMALS = st.builds(lambda digits, places: Decimal(digits).scaleb(-places), INTEGERS, st.integers(0, 9))
MARKS = (
    "{}",
    "#### {}",
    "\\boxed{{{}}}",
    "so \\boxed{{ {} }}.",
    "<answer>{}</answer>",
    "<think>\\boxed{{0}} #### 1</think>\nThe answer is {}.",
    "**Answer:** {}",
    "Final answer: **{}**",
    "work\n#### {} apples",
    "$${}$$",
)


def score(gold, text: str, **options) -> float:
    reward = MathReward(**options) if options else REWARD
    completion = Completion.sampled(0, 0, np.array([1]), np.zeros(1, np.float32), "stop", ((0, 0),), text)
    return reward(Prompt(0, "q", (1,), {"answer": gold}), completion)


def plain(value: Decimal) -> str:
    return f"{value:f}"


def forms(value: Decimal) -> list[str]:
    """Return ways to write one number, signs apart from the digits."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    above, below = Fraction(size).numerator, Fraction(size).denominator
    mantissa, exponent = f"{size:E}".split("E")
    return [
        plain(value),
        f"{sign}{size:,f}",
        f"{sign}{size:,f}".replace(",", "{,}"),
        f"{sign}{size:,f}".replace(",", "\\,"),
        f"\N{MINUS SIGN}{plain(size)}" if sign else plain(size),
        f"{sign}{above}/{below}",
        f"{sign}\\frac{{{above}}}{{{below}}}",
        f"{sign}\\dfrac{{{above}}}{{{below}}}",
        f"{sign}{mantissa}e{int(exponent)}",
        f"{sign}{mantissa} \\times 10^{{{int(exponent)}}}",
        f"x = {plain(value)}",
    ]


@given(DECIMALS, st.data())
@settings(max_examples=300, deadline=None)
def test_a_number_is_itself_in_every_form_under_every_mark(value, data):
    form, mark = data.draw(st.sampled_from(forms(value))), data.draw(st.sampled_from(MARKS))
    assume(not ("apples" in mark and "=" in form))
    assert score(plain(value), mark.format(form)) == 1.0, mark.format(form)


@given(INTEGERS, INTEGERS, st.data())
@settings(max_examples=300, deadline=None)
def test_integers_that_differ_are_never_equal(gold, other, data):
    assume(gold != other)
    form, mark = data.draw(st.sampled_from(forms(Decimal(other)))), data.draw(st.sampled_from(MARKS))
    assert score(str(gold), mark.format(form)) == 0.0, mark.format(form)


@given(DECIMALS, st.integers(1, 999), st.data())
@settings(max_examples=200, deadline=None)
def test_decimals_that_differ_in_a_place_they_both_write_are_never_equal(gold, steps, data):
    other = gold + steps * Decimal(1).scaleb(gold.as_tuple().exponent)
    mark = data.draw(st.sampled_from(MARKS))
    assert score(plain(gold), mark.format(plain(other))) == 0.0


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(6, 12))
@settings(max_examples=200, deadline=None)
def test_a_fraction_equals_what_it_is_rounded_to_in_seven_digits(above, below, digits):
    value = Fraction(above, below)
    rounded = Decimal(above) / Decimal(below)
    written = f"{rounded:.{digits}e}"
    assert score(f"{above}/{below}", written) == 1.0
    assert score(str(value.numerator) + "/" + str(value.denominator), written) == 1.0


@given(INTEGERS, st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_the_last_number_of_a_text_is_its_last_number(value, others):
    text = " ".join(f"first {number} then" for number in range(others)) + f" it is {value}."
    assert score(str(value), text, extract="last_number") == 1.0
    assert score(str(value + 1), text, extract="last_number") == 0.0


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_score(text):
    assert score("7", text) in (0.0, 1.0)
    assert score("7", text, fallback="last_number") in (0.0, 1.0)


@given(st.lists(INTEGERS, min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_list_has_no_order_and_a_tuple_has(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    written = ", ".join(map(str, values))
    assert score(written, f"\\boxed{{{', '.join(map(str, shuffled))}}}") == 1.0
    assert score(f"({written})", f"\\boxed{{({', '.join(map(str, shuffled))})}}") == float(shuffled == values)
    assert score(written, f"\\boxed{{{', '.join(map(str, values[:-1]))}}}") == 0.0
