"""From what a server returns to a Completion of ours: the same end and text as in the embedded engine."""

from typing import Any

import numpy as np

from megagrpo.engines.completion_rules import StopRule
from megagrpo.engines.server.answers import Sample
from megagrpo.types import Completion, Prompt


def build_completion(
    prompt: Prompt, index: int, sample: Sample, version: int, stop_rule: StopRule, tokenizer: Any
) -> Completion:
    """Return the completion, cut behind the token that ends it: a server may stop late (for strings), never
    early.

    Args:
        sample: checked (answers.check_samples).
        version: the weight version of a completion without tokens.
    """
    token_ids = np.array(sample.token_ids, dtype=np.int64)
    logprobs = np.array(sample.logprobs, dtype=np.float32)
    length = stop_rule.first_end(token_ids)
    token_ids, logprobs = token_ids[:length], logprobs[:length]
    spans = [
        (span.start, span.version) for span in sample.spans if span.start < min(span.end, len(token_ids))
    ]
    return Completion.sampled(
        prompt_id=prompt.id,
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason if length is None else "stop",
        weight_versions=tuple(spans) or ((0, version),),
        text=tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
        routed_experts=None
        if sample.routed_experts is None
        else sample.routed_experts[: len(prompt.token_ids) + len(token_ids) - 1],
    )
