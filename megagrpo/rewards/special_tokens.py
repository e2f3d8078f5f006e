"""The text that rewards see where special tokens are kept."""

from collections.abc import Callable, Collection
from typing import Any

from megagrpo.types import Completion


def text_with_special_tokens(tokenizer: Any, stop: Collection[str]) -> Callable[[Completion], str]:
    """Return a function that decodes a completion with its special tokens (`<think>`, tool calls), but
    without the one that ends it.

    Args:
        tokenizer: an HF tokenizer.
        stop: strings that end a completion; one that is a special token is a part of its text.
    """
    special = set(tokenizer.all_special_ids)

    def read(completion: Completion) -> str:
        token_ids = completion.token_ids.tolist()
        ends = completion.finish_reason == "stop" and bool(token_ids) and token_ids[-1] in special
        if ends and tokenizer.convert_ids_to_tokens(token_ids[-1]) not in stop:
            token_ids = token_ids[:-1]
        return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return read
