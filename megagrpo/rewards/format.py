"""Reward `format`: 1.0 where a completion has the demanded structure, else 0.0."""

import re
from collections.abc import Sequence

from megagrpo.errors import UserError
from megagrpo.rewards.reward import REWARDS
from megagrpo.types import Completion, Prompt


@REWARDS.register("format")
class FormatReward:
    """Check a completion's form, never its content.

    Args:
        tags: the text must be these elements in this order, each exactly once, with nothing but white space
            between and around them.
        pattern: regular expression that the whole stripped text must match (`.` matches newlines); given, it
            replaces `tags`.
        prefix: text that the prompt already began the answer with, e.g. `<think>` where the chat template
            opens it.

    Raises:
        UserError: no tag, a tag that is not a word, or a pattern that does not compile.
    """

    def __init__(
        self, tags: Sequence[str] = ("think", "answer"), pattern: str | None = None, prefix: str = ""
    ):
        if isinstance(tags, str) or not tags or not all(re.fullmatch(r"[\w-]+", str(tag)) for tag in tags):
            raise UserError(
                f"rewards.functions: 'format': tags is {tags!r}; a list of words is needed, "
                "e.g. [think, answer]"
            )
        self.tags, self.prefix = tuple(map(str, tags)), prefix
        try:
            self._pattern = re.compile(pattern, re.DOTALL) if pattern is not None else None
        except re.error as error:
            raise UserError(
                f"rewards.functions: 'format': pattern {pattern!r} is not a regular expression: {error}"
            ) from None

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return 1.0 where the form is right, else 0.0."""
        text = (self.prefix + completion.text).strip()
        return float(self._pattern.fullmatch(text) is not None if self._pattern else self._has_tags(text))

    def _has_tags(self, text: str) -> bool:
        # no regular expression here: scanning is linear in the text, whatever the model writes
        if any(text.count(mark) != 1 for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")):
            return False
        for tag in self.tags:
            if not text.startswith(f"<{tag}>"):
                return False
            text = text.partition(f"</{tag}>")[2].lstrip()
        return not text
