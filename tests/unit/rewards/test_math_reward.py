"""The `math` reward through the pool, its only home: math-verify's limits need a process's main thread."""

import pytest

from megagrpo.config.schema import RewardConfig, RewardsConfig
from megagrpo.rewards.math import extract_gold
from megagrpo.rewards.pool import RewardPool

WAYS = {
    "auto": {},
    "boxed": {"extract": "boxed"},
    "last_number": {"extract": "last_number"},
    "tag": {"tag": "answer"},
}
GSM8K = "She sold 48 + 24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.fixture(scope="module")
def score(make_group):
    """Return a function (way, gold, text) -> score, on one worker for the whole module."""
    functions = tuple(RewardConfig(name="math", options=options) for options in WAYS.values())
    config = RewardsConfig(functions=functions, timeout_seconds=60.0, failure_value=-5.0)
    with RewardPool(config) as pool:
        names = dict(zip(WAYS, pool.part_names, strict=True))
        yield lambda way, gold, text: pool.score(*make_group(text, answer=gold))[0].parts[names[way]]


@pytest.mark.parametrize(
    ("way", "gold", "text", "expected"),
    [
        ("auto", GSM8K, r"so it is \boxed{72}", 1.0),
        ("auto", GSM8K, "24 + 48 is 72.\n#### 72", 1.0),
        ("auto", GSM8K, "The final answer is 72.", 1.0),
        ("auto", GSM8K, r"72 clips? No: \boxed{27}", 0.0),
        ("auto", GSM8K, "I do not know.", 0.0),
        ("auto", GSM8K, "", 0.0),
        ("auto", "#### 1,234", r"\boxed{1234}", 1.0),
        ("auto", 42, r"\boxed{42.0}", 1.0),
        ("auto", r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("auto", r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", 1.0),
        ("auto", "$x^2 - 1$", r"\boxed{(x-1)(x+1)}", 1.0),
        ("auto", "$x^2 - 1$", r"\boxed{(x-1)^2}", 0.0),
        ("auto", r"The sum is \boxed{\sqrt{2}}.", r"\boxed{2^{1/2}}", 1.0),
        ("auto", "(1, 2)", r"\boxed{(1,2)}", 1.0),
        ("boxed", "72", "The final answer is 72.", 0.0),
        ("boxed", "72", r"\boxed{1} or rather \boxed{72}", 1.0),
        ("last_number", "1234", "first 5, then 1,234 apples", 1.0),
        ("last_number", "1234", "1,234 apples, then 5", 0.0),
        ("last_number", "72", "no number", 0.0),
        ("tag", "72", "<think>1</think><answer>72</answer>", 1.0),
        ("tag", "72", "72", 0.0),
        ("tag", "72", r"\boxed{72} <answer>27</answer>", 0.0),
    ],
)
def test_an_answer_is_right_where_it_equals_the_gold_one(score, way, gold, text, expected):
    assert score(way, gold, text) == expected


def test_a_gold_answer_that_cannot_be_parsed_is_a_counted_error(open_pool, make_group):
    (reward,) = open_pool("math").score(*make_group("72", answer=" "))
    assert (reward.value, reward.outcome) == (-5.0, "error")
    assert "gold answer '' can't be parsed" in reward.detail


def test_a_power_tower_is_killed_at_the_time_limit_and_the_others_are_scored(open_pool, make_group):
    pool = open_pool("math", timeout_seconds=1.5)
    rewards = pool.score(*make_group(r"\boxed{7}", r"\boxed{10^{10^{10^{10}}}}", r"\boxed{8}", answer="7"))
    assert [reward.outcome for reward in rewards] == ["ok", "timeout", "ok"]
    assert [reward.value for reward in rewards] == [1.0, -5.0, 0.0]


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        (GSM8K, "72"),
        ("a\n#### 1,000 \n", "1,000"),
        (r"thus \boxed{3}", "3"),
        (7, "7"),
        (" 0.5 ", "0.5"),
    ],
)
def test_gold_answers_are_taken_out_of_their_solutions(value, gold):
    assert extract_gold(value) == gold
