"""Rules that all engines share: what a request may ask, the seeds of engines that draw by themselves, and
where a completion ends.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megagrpo.engines.base import EngineError
from megagrpo.errors import UserError
from megagrpo.types import Completion, Prompt, SamplingParams
from megagrpo.wire.counter_sampling import row_keys

# log-probs are logarithms of probabilities that were summed in float32: above 0 by rounding, never by this
LARGEST_LOGPROB = 1e-4
_SEED_BITS = 62  # servers take signed 64-bit seeds; the sum with a completion index must stay one
# decoded before the stop string could start: a tail's first tokens may lose a space or half a character
_CONTEXT_TOKENS = 4


def check_request(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    completion_indices: Sequence[int],
    vocab_size: int,
    context_tokens: int,
) -> None:
    """Refuse what no engine could generate; see Engine.generate.

    Args:
        vocab_size: the model's token ids are 0 to this, exclusive. A server may die of an id beyond it.
        context_tokens: prompt and completion together.
    """
    if sampling.max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {sampling.max_new_tokens} is not at least 1")
    if len(set(completion_indices)) != len(completion_indices):
        raise EngineError(f"completion_indices {list(completion_indices)} are not distinct")
    for prompt in prompts:
        total = len(prompt.token_ids) + sampling.max_new_tokens
        if total > context_tokens:
            raise UserError(
                f"prompt {prompt.id}: {len(prompt.token_ids)} tokens + {sampling.max_new_tokens} new tokens "
                f"= {total}, "
                f"the model's context is {context_tokens}"
            )
        if not prompt.token_ids:
            raise UserError(f"prompt {prompt.id}: has no tokens")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
            raise UserError(
                f"prompt {prompt.id}: token ids must lie in 0 to {vocab_size - 1}, the model's vocabulary"
            )


def check_logprobs(completions: Sequence[Completion]) -> None:
    """Raise EngineError that names the first completion with a log-prob that is none."""
    for completion in completions:
        logprobs = completion.logprobs
        bad = ~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB))
        if bad.any():
            token = int(bad.argmax())
            name = f"prompt {completion.prompt_id}: completion {completion.index}"
            raise EngineError(f"{name}: the log-prob of token {token} is {logprobs[token]}")


def prompt_seed(sampling: SamplingParams, prompt: Prompt) -> int:
    """Return the seed of a prompt's completions in this step, below 2**62: completion i draws from this + i.

    Two prompts' seeds are nearer than their number of completions with a probability of about 2**-50 only.
    """
    return int(row_keys(sampling.seed, sampling.step, [prompt.id], [0])[0]) >> (64 - _SEED_BITS)


def consecutive_runs(completion_indices: Sequence[int], longest: int) -> list[range]:
    """Split indices into runs of at most `longest` consecutive ones, in order: a server draws each run's
    completions in one request.
    """
    runs: list[range] = []
    for index in completion_indices:
        if runs and index == runs[-1].stop and len(runs[-1]) < longest:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


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
        """Return how many of a completion's tokens, int64 [L], are left when it is cut behind its first end;
        None where it has no end.
        """
        length = len(tokens)
        ended = self.ends(np.broadcast_to(tokens, (length, length)), np.arange(1, length + 1))
        return int(ended.argmax()) + 1 if ended.any() else None

    def _completes_string(self, tail: np.ndarray) -> bool:
        text = self._tokenizer.decode(
            tail.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self._strings)
