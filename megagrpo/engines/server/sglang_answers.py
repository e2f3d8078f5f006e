"""What SGLang's `/generate` answers, as samples."""

import base64
import binascii
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from megagrpo.engines.base import EngineError
from megagrpo.engines.server.answers import (
    Sample,
    StrictModel,
    Text,
    TokenIds,
    VersionSpan,
    read_answer,
)


class _FinishReason(StrictModel):
    type: Text


class _Meta(StrictModel):
    finish_reason: _FinishReason
    # (log-prob, token id, text) per token; a request that was ended in the queue has none of it
    output_token_logprobs: list[Annotated[list[Any], Field(min_length=2)]] | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None


class _Completion(StrictModel):
    output_ids: TokenIds
    meta_info: _Meta


_LOGPROBS = TypeAdapter(list[float])
_COMPLETIONS = TypeAdapter(list[_Completion])


def read_samples(answer: Any, routed_shape: tuple[int, int] | None = None) -> list[Sample]:
    """Return the completions of an answer to a batch.

    Args:
        answer: the decoded list.
        routed_shape: (layers, experts per token) where routed experts were asked for.

    Raises:
        EngineError: it is no such answer.
    """
    return [_read_sample(part, routed_shape) for part in read_answer(_COMPLETIONS, answer)]


def _read_sample(part: _Completion, routed_shape: tuple[int, int] | None) -> Sample:
    meta, token_ids = part.meta_info, part.output_ids
    entries = meta.output_token_logprobs or []
    if [entry[1] for entry in entries] != token_ids[: len(entries)]:
        raise EngineError("the log-probs that came are of other tokens")
    return Sample(
        token_ids=token_ids,
        logprobs=read_answer(_LOGPROBS, [entry[0] for entry in entries]),
        finish_reason=meta.finish_reason.type,
        spans=meta.weight_versions or (),
        routed_experts=read_routed_experts(meta.routed_experts, routed_shape) if routed_shape else None,
    )


def read_routed_experts(encoded: str | None, shape: tuple[int, int]) -> np.ndarray | None:
    """Return the experts of every token that went through the model, int32 [P + L - 1, layers, experts per
    token]; None without any.

    P prompt tokens and L completion tokens: the last one was never an input.

    Raises:
        EngineError: it is not that.
    """
    if not encoded:
        return None
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32).reshape(-1, *shape)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"routed experts: {error}") from None
