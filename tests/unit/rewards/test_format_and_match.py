"""The `format` and `exact_match` rewards on the forms they must tell apart."""

import pytest

from megagrpo.rewards.build import build_scorer
from megagrpo.rewards.messages import RewardSpec


@pytest.fixture
def score(make_group):
    """Return a function (reward, options, text) -> score, in this process."""

    def score_text(reward: str, options: dict, text: str, **columns) -> float:
        return build_scorer(RewardSpec(reward, options))(*make_group(text, **columns))[0].value

    return score_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>7</answer>", 1.0),
        (" <think>a\nb</think>\n\n<answer>7</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think>so <answer>7</answer>", 0.0),
        ("<think>a</think><answer>7</answer> done", 0.0),
        ("<answer>7</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>7", 0.0),
        ("<think>a</think><think>b</think><answer>7</answer>", 0.0),
        ("<think>a <answer>7</answer></think><answer>7</answer>", 0.0),
        ("7", 0.0),
        ("", 0.0),
    ],
)
def test_each_tag_must_come_once_and_in_order(score, text, expected):
    assert score("format", {}, text) == expected


def test_a_prefix_that_the_prompt_already_holds_counts(score):
    assert score("format", {"prefix": "<think>"}, "a</think><answer>7</answer>") == 1.0
    assert score("format", {}, "a</think><answer>7</answer>") == 0.0


def test_a_pattern_must_match_the_whole_text(score):
    assert score("format", {"pattern": r"\d+\n\w+"}, " 12\nab ") == 1.0
    assert score("format", {"pattern": r"\d+"}, "12 a") == 0.0
    assert score("format", {"pattern": r"a.b"}, "a\nb") == 1.0


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({}, " 12 ", 1.0),
        ({}, "so 12", 0.0),
        ({"compare": "first_line"}, "\n12\nmore", 1.0),
        ({"compare": "last_line"}, "work\n12\n", 1.0),
        ({"compare": "last_line"}, "12\nwork", 0.0),
        ({"compare": "last_line"}, "", 0.0),
        ({"ignore_case": True, "column": "word"}, "PARIS", 1.0),
        ({"column": "word"}, "PARIS", 0.0),
    ],
)
def test_exact_match_compares_the_chosen_part(score, options, text, expected):
    assert score("exact_match", options, text, answer=12, word="Paris") == expected
