"""The strict reader of what servers answer. What an answer lacks, or has too much of, is an error that names
it; nothing of such an answer is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, TypeVar, get_args

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter
from pydantic import ValidationError as PydanticError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import Ack
from megagrpo.engines.completion_rules import LARGEST_LOGPROB
from megagrpo.types import FinishReason

Answer = TypeVar("Answer")
_FINISH_REASONS = get_args(FinishReason)
_SHOWN_CHARACTERS = 80  # how much of a wrong value an error shows

UNPUBLISHED = "default"  # label of weights that a server was started with, at vLLM and SGLang

Text = Annotated[str, StringConstraints(max_length=10_000)]
Version = Annotated[
    int,
    # servers label weights with text
    BeforeValidator(lambda label: int(label) if isinstance(label, str) and label.isdecimal() else label),
    Field(ge=0, lt=2**63),
]
TokenIds = list[Annotated[int, Field(ge=0)]]


class StrictModel(BaseModel):
    """A part of an answer: no value is converted; fields that are not read may have any."""

    model_config = ConfigDict(strict=True, frozen=True)


class VersionSpan(StrictModel):
    """Tokens [start, end) were sampled under a weight version."""

    version: Version
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]


def number_own_weights(completions: Any) -> None:
    """Call weights that nobody has published version 0, in the spans of completions: servers label those that
    they were started with by a word.
    """
    for completion in completions if isinstance(completions, list) else ():
        spans = completion.get("weight_versions") if isinstance(completion, dict) else None
        for span in spans if isinstance(spans, list) else ():
            if isinstance(span, dict) and span.get("version") == UNPUBLISHED:
                span["version"] = 0


@dataclass(frozen=True)
class Sample:
    """One completion as a server returns it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # a FinishReason, once it is checked
    spans: Sequence[VersionSpan]  # they cover all tokens, in order
    routed_experts: np.ndarray | None = None  # as in Completion, of all tokens that the server sampled


class ParameterDescription(TypedDict):
    """One parameter of an engine rank."""

    dtype: Text  # a torch dtype without its prefix
    shape: list[Annotated[int, Field(ge=0)]]


class CommitAck(StrictModel):
    """What an engine rank says of a commit."""

    version: int


ACKS = TypeAdapter(list[Ack])
COMMIT_ACKS = TypeAdapter(list[CommitAck])
PARAMETERS = TypeAdapter(list[dict[str, ParameterDescription]])
CHECKSUMS = TypeAdapter(list[dict[str, str]])
"""What the ranks of an engine answer, by rank."""


def read_answer(kind: TypeAdapter[Answer], answer: Any) -> Answer:
    """Return an answer as what it must be.

    Args:
        answer: decoded JSON.

    Raises:
        EngineError: names the first place that is wrong, and its value.
    """
    try:
        return kind.validate_python(answer)
    except PydanticError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the answer"
        raise EngineError(f"{place} = {_shown(first['input'])}: {first['msg']}") from None


@dataclass(frozen=True)
class Asked:
    """What a request for completions asked for; its answer is held to that."""

    num_completions: int
    max_new_tokens: int
    vocab_size: int


def check_samples(samples: Sequence[Sample], asked: Asked, newest_version: int) -> None:
    """Refuse completions that are not what was asked for.

    Args:
        newest_version: no weights are newer; not those of an update either that has begun.

    Raises:
        EngineError: names the completion of the answer, by its place, and what is wrong.
    """
    if len(samples) != asked.num_completions:
        raise EngineError(f"{len(samples)} completions came, {asked.num_completions} were asked for")
    for place, sample in enumerate(samples):
        if problem := _find_problem(sample, asked) or _find_version_problem(sample, newest_version):
            raise SampleError(place, problem)


class SampleError(EngineError):
    """One completion of an answer is wrong."""

    def __init__(self, place: int, problem: str):
        super().__init__(f"completion {place} of the answer: {problem}")
        self.place, self.problem = place, problem


def _find_problem(sample: Sample, asked: Asked) -> str | None:
    token_ids, logprobs = sample.token_ids, sample.logprobs
    if sample.finish_reason not in _FINISH_REASONS:
        known = ", ".join(_FINISH_REASONS)
        return f"finish reason {_shown(sample.finish_reason)} is none of {known}"
    if len(token_ids) != len(logprobs):
        return f"{len(token_ids)} tokens and {len(logprobs)} log-probs"
    if len(token_ids) > asked.max_new_tokens:
        return f"{len(token_ids)} tokens, at most {asked.max_new_tokens} were asked for"
    if not token_ids and sample.finish_reason != "abort":
        return f"no tokens, though it ended by {sample.finish_reason!r}"
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < asked.vocab_size:
            return f"token {place} has id {token_id}, the vocabulary is 0 to {asked.vocab_size - 1}"
    for place, logprob in enumerate(logprobs):
        if not isfinite(logprob) or logprob > LARGEST_LOGPROB:
            return f"the log-prob of token {place} is {logprob}"
    return None


def _find_version_problem(sample: Sample, newest_version: int) -> str | None:
    end, version = 0, -1
    for span in sample.spans:
        if span.start != end or span.end < span.start:
            place = f"the span {span.start} to {span.end} of weight version {span.version}"
            return f"{place} does not begin where the one before ends, at token {end}"
        if span.version > newest_version:
            return f"weight version {span.version} is none yet, the newest one is {newest_version}"
        if span.version < version:
            return f"weight version {span.version} comes after version {version}"
        end, version = span.end, span.version
    if end != len(sample.token_ids):
        return f"the weight versions of {end} of {len(sample.token_ids)} tokens came"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
