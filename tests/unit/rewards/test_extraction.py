"""Where an answer is found, and where it is not."""

import pytest

from megagrpo.rewards.extraction import extract_after_hashes, extract_boxed, extract_last_number, extract_tag


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{7}", "7"),
        (r"a \boxed{\frac{1}{2}} b", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{2", "1"),  # the last one was cut off
        (r"\boxed{2", None),
        ("7", None),
        ("", None),
    ],
)
def test_boxed_content_is_the_last_one_whose_braces_balance(text, content):
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 4.", "4"),
        ("it costs $1,234.50 today", "1234.50"),
        ("x = -7", "-7"),
        ("a half is 1/2", "1/2"),
        ("1,23", "23"),  # no thousands separator there
        ("none", None),
    ],
)
def test_the_last_number_has_no_thousands_separators(text, number):
    assert extract_last_number(text) == number


def test_the_answer_mark_of_gsm8k_ends_with_its_line():
    assert extract_after_hashes("work\n#### 12 \nmore") == "12"
    assert extract_after_hashes("work 12") is None


def test_a_tag_gives_its_last_complete_element():
    assert extract_tag("<answer>1</answer> <answer> 2 </answer>", "answer") == "2"
    assert extract_tag("<answer>1</answer> <answer>2", "answer") == "1"
    assert extract_tag("1</answer>", "answer") is None
