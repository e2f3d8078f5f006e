"""Reward `exact_match`: 1.0 where the text, or one line of it, equals a column of the prompt, else 0.0."""

from megagrpo.rewards.reward import REWARDS, check_choice, read_column
from megagrpo.types import Completion, Prompt

PLACES = ("text", "first_line", "last_line")


@REWARDS.register("exact_match")
class ExactMatchReward:
    """Compare strings; white space at both ends is ignored.

    Args:
        column: the expected text, turned into a string.
        compare: `text` (all of it), `first_line` or `last_line` (of the lines that are not blank).
        ignore_case: compare case-folded.

    Raises:
        UserError: `compare` is not one of the three.
    """

    def __init__(self, column: str = "answer", compare: str = "text", ignore_case: bool = False):
        check_choice("exact_match", "compare", compare, PLACES)
        self.column, self.compare, self.ignore_case = column, compare, ignore_case

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return 1.0 or 0.0; a prompt without the column raises UserError."""
        return self.judge(prompt, completion)[0]

    def judge(self, prompt: Prompt, completion: Completion) -> tuple[float, str]:
        """Return 1.0 or 0.0, and the text that was compared."""
        expected = str(read_column(prompt, self.column, "exact_match")).strip()
        text = completion.text.strip()
        if self.compare != "text":
            lines = text.splitlines() or [""]
            text = lines[0 if self.compare == "first_line" else -1].strip()
        if self.ignore_case:
            text, expected = text.casefold(), expected.casefold()
        return float(text == expected), text
