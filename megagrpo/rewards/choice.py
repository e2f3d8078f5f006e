"""Reward `choice`: 1.0 where a completion chooses the right option of several, else 0.0."""

import re
from typing import Any

from megagrpo.rewards.places import find_after_hashes, find_boxed, find_phrase, find_tagged, strip_reasoning
from megagrpo.rewards.reward import REWARDS, read_column
from megagrpo.types import Completion, Prompt

_DECORATION = re.compile(r"\\text(?:bf|rm)?\s*\{([^{}]*)\}|[*$`\"]|\\[()\[\]]")
_LETTER = r"(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Z])(?![A-Za-z0-9'\u2019+\-=]))"
_NAMED = re.compile(
    rf"(?i:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer|letter)\s*(?:is\s*)?:?\s*)?{_LETTER}"
)
# what may follow a letter: the end, a mark with the option's text, a reason
_AFTER = re.compile(r"\s*(?:$|[.):]|[,;]?\s*(?:because|since|as|for)\b)")
_ANOTHER = re.compile(r"[\s,/&.)]*(?:or|and|,|/|&)[\s(]*(?:option\s+)?[A-Z]\b(?![a-z])")


@REWARDS.register("choice")
class ChoiceReward:
    r"""Compare the option that a completion chooses with a column of its prompt.

    The choice stands where `math` looks for an answer: in `<answer>`, in `\boxed{}`, after `####`, after
    `answer is`; or the whole text is the choice. It is a letter (`B`, `(b)`, `B. Paris`); where `options`
    names a column with the list of option texts, also the whole text of one. Two letters are no choice.

    Args:
        column: the right option: a letter, or with `options` also its position from 0 or its text.
        options: column with the list of option texts, in the order of their letters.
        reasoning: what stands between these tags is no answer.
    """

    def __init__(self, column: str = "answer", options: str | None = None, reasoning: str = "think"):
        self.column, self.options, self.reasoning = column, options, reasoning

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return 1.0 or 0.0; raises as `judge`."""
        return self.judge(prompt, completion)[0]

    def judge(self, prompt: Prompt, completion: Completion) -> tuple[float, str]:
        """Return 1.0 or 0.0, and the letter that was chosen.

        Raises:
            UserError: the prompt has no such column.
            ValueError: the column names no option.
        """
        texts = [] if self.options is None else read_column(prompt, self.options, "choice")
        gold = read_gold_option(read_column(prompt, self.column, "choice"), texts)
        choice = find_choice(strip_reasoning(completion.text, self.reasoning), texts)
        return float(choice == gold), choice or ""


def read_gold_option(value: Any, texts: list[str]) -> str:
    """Return the letter that a column means; raises ValueError where it means none."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(texts):
        return _letter(value)
    if isinstance(value, str):
        letter = _read_option(value, texts) or (value.strip().upper() if len(value.strip()) == 1 else None)
        if letter is not None and (not texts or ord(letter) - ord("A") < len(texts)):
            return letter
    raise ValueError(
        f"the right option is {value!r:.80}; a letter is needed, or with `options` a position or text"
    )


def find_choice(text: str, texts: list[str]) -> str | None:
    """Return the letter that a completion chooses, or None where it chooses none or several."""
    tagged = find_tagged(text, "answer")
    if tagged is not None:
        text = tagged
    for find in (find_boxed, find_after_hashes, find_phrase):
        found = find(text)
        if found is not None:
            return _read_option(found, texts)
    return _read_option(text, texts)


def _read_option(text: str, texts: list[str]) -> str | None:
    text = _DECORATION.sub(r"\1", text).strip()
    plain = text.rstrip(".").casefold()
    same = [
        position for position, option in enumerate(texts) if option.strip().rstrip(".").casefold() == plain
    ]
    if same:
        return _letter(same[0]) if len(same) == 1 else None
    if re.fullmatch(r"[A-Za-z]\.?", text):
        return text[0].upper()
    match = _NAMED.match(text)
    if match is None or _ANOTHER.match(text, match.end()):
        return None
    bracketed = match[1] or match[2]
    if not bracketed and not _AFTER.match(text, match.end()):
        return None
    letter = (bracketed or match[3]).upper()
    others = {found.upper() for found in re.findall(r"\(([A-Za-z])\)", text)} - {letter}
    return None if others else letter


def _letter(position: int) -> str:
    return chr(ord("A") + position)
