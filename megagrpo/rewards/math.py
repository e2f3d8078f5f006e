"""Reward `math`: 1.0 where the answer equals the gold answer, as a number or symbolically, else 0.0.

What is looked for, in which order, and what a number is: `README.md` here, "The grammar of `math`".
"""

from fractions import Fraction
from typing import Any

from megagrpo.errors import UserError
from megagrpo.rewards.places import (
    find_after_hashes,
    find_boxed,
    find_phrase,
    find_tagged,
    strip_reasoning,
)
from megagrpo.rewards.reading import last_number, read_marked, read_statement, read_value
from megagrpo.rewards.reward import REWARDS, check_choice, read_column
from megagrpo.rewards.values import Value, as_latex, is_same
from megagrpo.types import Completion, Prompt

EXTRACTS = ("auto", "boxed", "last_number")
FALLBACKS = ("none", "last_number")


@REWARDS.register("math")
class MathReward:
    r"""Compare a completion's final answer with a column of its prompt.

    Args:
        column: the gold answer: a number, LaTeX, words, or a solution that marks its answer as a completion
            does.
        extract: where the answer stands. `auto`: the first mark that is there, of `<answer>`, `\boxed{}`,
            `####`, `Answer:`, else the whole text where it is one value; `boxed`: the last `\boxed{}` alone;
            `last_number`: the last number, whatever marks there are.
        fallback: for `auto`, where nothing is marked: `none` scores 0.0, `last_number` takes the last number.
        tag: look only inside the last `<tag>...</tag>`; a text without it scores 0.0.
        reasoning: what stands between these tags is no answer.
        tolerance: relative, between numbers of which one is written with a decimal point.

    Raises:
        UserError: a value is not allowed.
    """

    def __init__(
        self,
        column: str = "answer",
        extract: str = "auto",
        fallback: str = "none",
        tag: str | None = None,
        reasoning: str = "think",
        tolerance: float = 1e-6,
    ):
        check_choice("math", "extract", extract, EXTRACTS)
        check_choice("math", "fallback", fallback, FALLBACKS)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
            raise UserError(f"rewards.functions: 'math': tolerance is {tolerance!r}; 0 to below 1 is allowed")
        self.column, self.extract, self.fallback = column, extract, fallback
        self.tag, self.reasoning = tag, reasoning
        # through the text: 1e-6 is meant, not the nearest binary fraction
        self.tolerance = Fraction(str(tolerance))
        # here, because SymPy costs a second that other rewards need not pay
        from megagrpo.rewards import equality

        self._equality = equality

    def warm_up(self) -> None:
        """Pay the first-use cost of the LaTeX parser (0.2 to 2 s) before any completion is timed."""
        for text in (r"\frac{1}{2}", "x^2+1", r"\sqrt{2}"):
            self._equality.is_same_expression(r"\frac{1}{2}", text, self.tolerance)

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return 1.0 or 0.0; raises as `judge`."""
        return self.judge(prompt, completion)[0]

    def judge(self, prompt: Prompt, completion: Completion) -> tuple[float, str]:
        """Return 1.0 or 0.0, and the answer in LaTeX: a right one as the gold answer is written.

        Raises:
            UserError: the prompt has no such column.
            ValueError: the gold answer is null, or can't be parsed.
            TimeoutError: parsing or comparing took too long.
        """
        gold = read_gold(read_column(prompt, self.column, "math"))
        answer = self.find_answer(completion.text)
        if answer is None:
            return 0.0, ""
        if is_same(gold, answer, self.tolerance, self._equality.is_same_expression):
            return 1.0, as_latex(gold)
        return 0.0, as_latex(answer)

    def find_answer(self, text: str) -> Value | None:
        """Return what the text answers, or None where it does not."""
        text = strip_reasoning(text, self.reasoning)
        if self.tag is not None:
            tagged = find_tagged(text, self.tag)
            if tagged is None:
                return None
            text = tagged
        if self.extract == "last_number":
            return last_number(text)
        if self.extract == "boxed":
            boxed = find_boxed(text)
            return None if boxed is None else read_marked(boxed)
        is_marked, answer = _find_marked(text)
        if is_marked:
            return answer
        return last_number(text) if self.fallback == "last_number" else None


def read_gold(value: Any) -> Value:
    """Return the gold answer that a column holds.

    Raises:
        ValueError: it is no answer: null, empty, a list, a truth value.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        kind = "null" if value is None else type(value).__name__
        raise ValueError(f"the gold answer is {kind}; a number or text is needed")
    text = str(value)
    gold = _find_marked(text)[1] or read_marked(text)
    if gold is None:
        raise ValueError(f"gold answer {text[:80]!r} can't be parsed")
    return gold


def _find_marked(text: str) -> tuple[bool, Value | None]:
    """Return whether an answer is marked (or is the whole text), and what it says."""
    tagged = find_tagged(text, "answer")
    if tagged is not None:
        return True, _find_marked(tagged)[1] or read_marked(tagged)
    boxed = find_boxed(text)
    if boxed is not None:
        return True, read_marked(boxed)
    for find in (find_after_hashes, find_phrase):
        found = find(text)
        if found is not None:
            return True, read_statement(found)
    whole = read_value(text)
    return whole is not None, whole
