"""What a user's reward receives: texts, as in other trainers, that carry what else is known of them."""

from collections.abc import Mapping
from typing import Any

from megagrpo.types import Completion, FinishReason, Prompt


class PromptText(str):
    """The text of a prompt."""

    id: int  # position of its row in the data set
    columns: Mapping[str, Any]  # every other column of the row
    token_ids: tuple[int, ...]

    def __new__(cls, prompt: Prompt) -> "PromptText":
        """Return the prompt as text."""
        text = super().__new__(cls, prompt.text)
        text.id, text.columns, text.token_ids = prompt.id, prompt.columns, prompt.token_ids
        return text

    @property
    def text(self) -> str:
        """The bare text."""
        return str(self)


class CompletionText(str):
    """The text of a completion."""

    completion_index: int  # which of the group's completions
    token_ids: tuple[int, ...]  # the stop token included where one was sampled
    finish_reason: FinishReason

    def __new__(cls, completion: Completion) -> "CompletionText":
        """Return the completion as text."""
        text = super().__new__(cls, completion.text)
        text.completion_index, text.finish_reason = completion.index, completion.finish_reason
        text.token_ids = tuple(completion.token_ids.tolist())
        return text

    @property
    def text(self) -> str:
        """The bare text."""
        return str(self)
