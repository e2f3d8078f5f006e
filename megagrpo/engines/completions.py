"""From what a server returns to a Completion of ours: the same end, text and checks as in the embedded
engine.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megagrpo.engines.base import EngineError
from megagrpo.engines.embedded.stopping import StopRule
from megagrpo.types import Completion, FinishReason, Prompt


@dataclass(frozen=True)
class Sample:
    """One completion as a server returns it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: tuple[tuple[int, int], ...]  # as in Completion
    routed_experts: np.ndarray | None = None  # as in Completion, of all tokens that the server sampled


def build_completion(
    prompt: Prompt, index: int, sample: Sample, stop_rule: StopRule, tokenizer: Any
) -> Completion:
    """Return the completion, cut behind the token that ends it: a server may stop late (for strings), never
    early.

    Raises:
        EngineError: a token has no log-prob, or one that is not finite.
    """
    token_ids = np.array(sample.token_ids, dtype=np.int64)
    logprobs = np.array(sample.logprobs, dtype=np.float32)
    if len(token_ids) != len(logprobs):
        raise EngineError(
            f"prompt {prompt.id}: completion {index} came with {len(token_ids)} tokens and "
            f"{len(logprobs)} log-probs"
        )
    if not np.isfinite(logprobs).all():
        place = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise EngineError(
            f"prompt {prompt.id}: the log-prob of token {place} of completion {index} is {logprobs[place]}"
        )
    length = stop_rule.first_end(token_ids)
    token_ids, logprobs = token_ids[:length], logprobs[:length]
    return Completion(
        prompt_id=prompt.id,
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason if length is None else "stop",
        weight_versions=tuple(
            span for span in sample.weight_versions if span[0] == 0 or span[0] < len(token_ids)
        ),
        text=tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
        routed_experts=None
        if sample.routed_experts is None
        else sample.routed_experts[: len(prompt.token_ids) + len(token_ids) - 1],
    )
