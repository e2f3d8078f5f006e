"""What SGLang's `/generate` answers, as samples."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from megagrpo.engines.base import EngineError
from megagrpo.engines.completions import Sample
from megagrpo.types import FinishReason

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def read_sample(answer: Mapping[str, Any], routed_shape: tuple[int, int] | None = None) -> Sample:
    """Return one completion of an answer.

    Args:
        answer: one entry of the list that `/generate` answers for a batch.
        routed_shape: (layers, experts per token) where routed experts were asked for.

    Raises:
        EngineError: the request ended in a way that no engine of this project knows.
    """
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    reason = meta["finish_reason"]["type"]
    if reason not in _FINISH_REASONS:
        raise EngineError(f"request {meta['id']}: finished by {meta['finish_reason']}")
    # [log-prob, token id, text] per token; a request that was ended in the queue has none of it
    logprobs = [entry[0] for entry in (meta.get("output_token_logprobs") or [])]
    return Sample(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=_FINISH_REASONS[reason],
        weight_versions=read_versions(meta),
        routed_experts=read_routed_experts(meta, routed_shape) if routed_shape else None,
    )


def read_versions(meta: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return (first token, weight version) per span, ascending, without empty spans; the version alone
    where there are no tokens.
    """
    spans = [span for span in meta.get("weight_versions") or [] if span["end"] > span["start"]]
    if not spans:
        return ((0, int(meta["weight_version"])),)
    return tuple((span["start"], int(span["version"])) for span in spans)


def read_routed_experts(meta: Mapping[str, Any], shape: tuple[int, int]) -> np.ndarray | None:
    """Return the experts of every token that went through the model, int32 [P + L - 1, layers, experts per
    token]; None without any.

    P prompt tokens and L completion tokens: the last one was never an input.
    """
    encoded = meta.get("routed_experts")
    if not encoded:
        return None
    return np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, *shape)
