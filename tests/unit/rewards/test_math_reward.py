"""The `math` reward: its grammar on cases whose scores are known, and its limits.

Most cases are in `cases/math.jsonl`; they say what mathematics says, never what the reward answers. The
reward is called in this process, in its main thread: math-verify's limits need one. Its time-outs go through
the pool.
"""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from megagrpo.config.rollout_sections import RewardsConfig
from megagrpo.errors import UserError
from megagrpo.rewards.math import MathReward, read_gold
from megagrpo.rewards.numbers import Number
from megagrpo.rewards.pool import RewardPool
from megagrpo.rewards.values import Collection, Expression, Words

EXAMPLES = Path(__file__).parents[3] / "examples"
CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases/math.jsonl").read_text(encoding="utf-8").splitlines()
]
MAX_FALSE_REJECTS = (
    0.02  # of right answers: forms are many; a false accept is what a policy learns to exploit
)


@pytest.fixture
def score(make_group):
    """Return a function (gold, text, options) -> score."""

    def score_text(gold, text: str, **options) -> float:
        prompts, completions = make_group(text, answer=gold)
        return MathReward(**options)(prompts[0], completions[0])

    return score_text


def test_no_wrong_answer_of_the_cases_is_accepted_and_hardly_a_right_one_rejected(score):
    wrong = [case for case in CASES if case["want"] == 0.0]
    right = [case for case in CASES if case["want"] == 1.0]
    assert len(wrong) >= 150 and len(right) >= 150

    def judge(case) -> float:
        return score(case["columns"]["answer"], case["text"], **case.get("options", {}))

    assert [case for case in wrong if judge(case) != 0.0] == []
    rejected = [case for case in right if judge(case) != 1.0]
    assert len(rejected) <= MAX_FALSE_REJECTS * len(right), rejected


@pytest.mark.parametrize(
    "text",
    [
        "<answer>42</answer>",
        "<answer> 42 </answer>",
        "<think>7 or 8</think><answer>42</answer>",
        "<think>\\boxed{7}</think>\n<answer>42</answer>",
    ],
)
def test_what_format_asks_for_math_reads_at_both_defaults(open_pool, make_group, text):
    pool = open_pool("math", "format")
    (reward,) = pool.score(*make_group(text, answer="42"))
    assert reward.parts["math"] == 1.0
    (reward,) = pool.score(*make_group(text.replace("42", "41"), answer="42"))
    assert reward.parts["math"] == 0.0


@pytest.mark.parametrize("gold", [None, True, [7], {"answer": 7}])
def test_a_gold_answer_that_is_none_is_an_error_of_the_data(score, gold):
    with pytest.raises(ValueError, match=r"the gold answer is .*; a number or text is needed"):
        score(gold, "\\boxed{None}")


@pytest.mark.parametrize("gold", ["", " ", "####", "\\boxed{}", "\\frac{", "3 or not 4 and so on with 5"])
def test_a_gold_answer_that_says_nothing_is_an_error_of_the_data(score, gold):
    with pytest.raises(ValueError, match="can't be parsed"):
        score(gold, "7")


def test_an_error_of_the_data_is_counted_and_named(open_pool, make_group):
    (reward,) = open_pool("math").score(*make_group("72", answer=None))
    assert (reward.value, reward.outcome) == (-5.0, "error")
    assert reward.detail == "math: ValueError: the gold answer is null; a number or text is needed"


def number(value) -> Number:
    return Number(Fraction(value))


@pytest.mark.parametrize(
    ("column", "gold"),
    [
        ("She sold 48 + 24 = <<48+24=72>>72 clips.\n#### 72", number(72)),
        ("a\n#### 1,000 \n", number(1000)),
        (r"thus \boxed{3}", number(3)),
        ("#### Step 1\nAdd them.\nSo \\boxed{5}.", number(5)),
        (r"thus $x$ is \boxed{\frac{1}{2}} as was asked", number("1/2")),
        (7, number(7)),
        (" 0.5 ", Number(Fraction(1, 2), step=Fraction(1, 10))),
        ("18 people", number(18)),
        ("3, 5", Collection("", "", (number(3), number(5)))),
        ("Evelyn", Words("evelyn")),
        ("x^2", Expression("x^2")),
    ],
)
def test_gold_answers_are_taken_out_of_their_solutions(column, gold):
    assert read_gold(column) == gold


def test_the_tolerance_is_relative_and_an_option(score):
    assert score("0.00000001", "0.00000002") == 0.0
    assert score("100.0", "100.4") == 0.0
    assert score("0.52", "0.5", tolerance=0.05) == 1.0
    assert score("0.52", "0.5", tolerance=0.01) == 0.0


@pytest.mark.parametrize(
    "options",
    [{"extract": "text"}, {"fallback": "first"}, {"tolerance": -1}, {"tolerance": "1e-6"}],
)
def test_a_value_that_is_not_allowed_is_named(options):
    (name,) = options
    with pytest.raises(UserError, match=f"'math': {name} is .*allowed"):
        MathReward(**options)


REPEATED = [
    *["\\boxed{", "\\fbox ", "\\boxed{1}", "\\boxed{1}, ", "#### ", "####\n", "#### Step one\n", "<answer>"],
    *[
        "</answer>",
        "<think>",
        "the answer is ",
        "answer:",
        "answer: \n",
        "answer (",
        "1",
        "111 ",
        "111,",
        "1/",
    ],
    *["1 1/1 ", "-", "$", "*", ".", "\n", "1e", "\\frac{1}{", "1 x 10^", "½", "√", "²", "(", "1 and ", "5% "],
]


@pytest.mark.parametrize("unit", REPEATED, ids=range(len(REPEATED)))
def test_a_text_of_20_000_repetitions_takes_less_than_a_second(unit):
    reward = MathReward(fallback="last_number")
    started = time.process_time()
    reward.find_answer(unit * 20_000)
    # measured: 0.01 to 0.5 s; what is quadratic takes 10 s and more
    assert time.process_time() - started < 3.0


def test_20_000_boxes_inside_each_other_are_read_in_one_pass():
    started = time.process_time()
    assert MathReward().find_answer("\\boxed{" * 20_000 + "7" + "}" * 20_000) == number(7)
    assert time.process_time() - started < 1.0


def test_a_power_tower_is_killed_at_the_time_limit_and_the_others_are_scored(open_pool, make_group):
    pool = open_pool("math", timeout_seconds=1.5)
    rewards = pool.score(*make_group(r"\boxed{7}", r"\boxed{10^{10^{10^{10}}}}", r"\boxed{8}", answer="7"))
    assert [reward.outcome for reward in rewards] == ["ok", "timeout", "ok"]
    assert [reward.value for reward in rewards] == [1.0, -5.0, 0.0]


def test_a_thousand_word_problems_are_scored(make_group):
    rows = [json.loads(line) for line in (EXAMPLES / "gsm8k/sample.jsonl").read_text().splitlines()]
    prompts, completions = [], []
    for number in range(1000):
        row = rows[number % len(rows)]
        more, completion = make_group(row["answer"], prompt_id=number, answer=row["answer"])
        prompts += more
        completions += completion
    with RewardPool(RewardsConfig(functions=[{"name": "math"}], workers=2)) as pool:
        rewards = pool.score(prompts, completions)
    assert {reward.value for reward in rewards} == {1.0}
