"""When a completion ends: end tokens, stop strings."""

from typing import Any

import numpy as np

from megagrpo.types import SamplingParams

# decoded before the stop string could start: a tail's first tokens may lose a space or half a character
_CONTEXT_TOKENS = 4


class StopRule:
    """Says whether a completion's newest token ends it.

    A stop string ends a completion with the token that completes it in the decoded text. Only a tail is
    decoded: a token that adds to the text adds at least one byte, so a stop string of b bytes lies within the
    last b tokens. Strings are searched in the text with special tokens spelled out, so `stop: ["<|im_end|>"]`
    works.
    """

    def __init__(self, tokenizer: Any, end_token_ids: set[int], sampling: SamplingParams):
        """`end_token_ids` are the model's; `sampling.stop_token_ids` and `sampling.stop` are added."""
        self._tokenizer = tokenizer
        self._end_token_ids = np.array(sorted(end_token_ids | set(sampling.stop_token_ids)), dtype=np.int64)
        self._strings = tuple(string for string in sampling.stop if string)
        self._tail = _CONTEXT_TOKENS + max((len(string.encode()) for string in self._strings), default=0)

    def ends(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return for each row whether its newest token ends it, bool [R].

        Args:
            tokens: int64 [R, >= L], the completions so far.
            lengths: int64 [R], at least 1.
        """
        rows = np.arange(len(lengths))
        ended = np.isin(tokens[rows, lengths - 1], self._end_token_ids)
        if self._strings:
            for row in rows[~ended]:
                ended[row] = self._completes_string(
                    tokens[row, max(0, lengths[row] - self._tail) : lengths[row]]
                )
        return ended

    def first_end(self, tokens: np.ndarray) -> int | None:
        """Return how many of a completion's tokens, int64 [L], it has when the first end in it is kept;
        None without an end in it.
        """
        length = len(tokens)
        ended = self.ends(np.broadcast_to(tokens, (length, length)), np.arange(1, length + 1))
        return int(ended.argmax()) + 1 if ended.any() else None

    def _completes_string(self, tail: np.ndarray) -> bool:
        text = self._tokenizer.decode(
            tail.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self._strings)
