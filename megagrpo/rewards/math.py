"""Reward `math`: 1.0 where the answer equals the gold answer, symbolically or numerically, else 0.0."""

from typing import Any

from megagrpo.rewards.extraction import extract_after_hashes, extract_boxed, extract_last_number, extract_tag
from megagrpo.rewards.reward import REWARDS, check_choice, read_column
from megagrpo.types import Completion, Prompt

PLACES = ("auto", "boxed", "last_number", "text")


@REWARDS.register("math")
class MathReward:
    r"""Compare a completion's final answer with a column of its prompt.

    Args:
        column: the gold answer: a number, LaTeX, a solution with `\boxed{}`, or GSM8K's solution ending in
            `#### 42`.
        extract: where the answer stands. `boxed`: the last `\boxed{}`; `last_number`: the last number;
            `text`: what math-verify finds in the whole text (anchored answers first, then the last
                expression); `auto`: `boxed`, else after `####`, else `text`.
        tag: look only inside the last `<tag>...</tag>`; a text without it scores 0.0.

    Raises:
        UserError: a value is not allowed.
    """

    def __init__(self, column: str = "answer", extract: str = "auto", tag: str | None = None):
        check_choice("math", "extract", extract, PLACES)
        self.column, self.extract, self.tag = column, extract, tag
        # here, because SymPy costs a second that other rewards need not pay
        from megagrpo.rewards import equality

        self._equality = equality

    def warm_up(self) -> None:
        """Pay the first-use cost of the LaTeX parser (0.2 to 2 s) before any completion is timed."""
        for text in (r"$\frac{1}{2}$", "$x^2+1$", "0.5"):
            self._equality.is_equal(r"\frac{1}{2}", text)

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return 1.0 or 0.0.

        Raises:
            UserError: the prompt has no such column.
            ValueError: the gold answer can't be parsed.
            TimeoutError: parsing or comparing took too long.
        """
        gold = extract_gold(read_column(prompt, self.column, "math"))
        answer = self._extract_answer(completion.text)
        return float(answer is not None and self._equality.is_equal(gold, answer))

    def _extract_answer(self, text: str) -> str | None:
        """Return the text to parse, or None where the answer is not where it must be."""
        inside = text if self.tag is None else extract_tag(text, self.tag)
        if inside is None or self.extract == "text":
            return inside
        if self.extract == "last_number":
            return extract_last_number(inside)
        marked = extract_boxed(inside)
        if marked is None and self.extract == "auto":
            marked = extract_after_hashes(inside)
            if marked is None:
                return inside
        return None if marked is None else self._equality.as_formula(marked)


def extract_gold(value: Any) -> str:
    r"""Return the gold answer proper of a column's value: after `####`, else inside the last `\boxed{}`,
    else all of it.
    """
    text = str(value).strip()
    return extract_after_hashes(text) or extract_boxed(text) or text
