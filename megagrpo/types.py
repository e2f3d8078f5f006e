"""The frozen values that pass between the layers.

Shape legend, used everywhere: B sequences, S padded length, T packed tokens, G completions per prompt,
N prompts, V vocabulary, Vp = padded V / tp, P tokens of a prompt, L tokens of a completion or a span.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, tokenised."""

    id: int  # position of the row in its data set: stable over epochs, ranks and resumes
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)  # every other column of the row, e.g. the answer
    source: str = ""  # name in data.mixture, else the row's column `source`


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    stop: tuple[str, ...] = ()  # a completion ends with the token that completes one of these strings
    stop_token_ids: tuple[int, ...] = ()  # beside the tokenizer's end-of-sequence token(s)
    seed: int = 0  # run seed of the counter-based draws
    step: int = 0  # step whose draws these are; evaluations use their own stream


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a completion that have one origin: what weights of one version sampled, or what
    came from elsewhere (the answer of a tool, say).
    """

    token_ids: np.ndarray  # int64 [L]
    # float32 [L], at the sampling temperature, over the whole vocabulary (vLLM's: over what top-k / top-p
    # kept); None: the policy has not sampled these tokens
    logprobs: np.ndarray | None
    weight_version: int  # the weights that sampled the tokens, or that were served when they came
    is_trained: bool = True  # False: the loss, its denominator and every statistic leave these tokens out

    def __post_init__(self) -> None:
        """Refuse log-probs that are not those of the tokens, and trained tokens that have none."""
        if self.logprobs is None and self.is_trained:
            raise ValueError("a span without log-probs can't be trained")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"a span of {len(self.token_ids)} tokens has {len(self.logprobs)} log-probs")


@dataclass(frozen=True)
class Completion:
    """One completion, as a sequence of spans; what reads it as one text finds the spans joined."""

    prompt_id: int
    index: int  # 0 <= index < G: which of the group's completions
    spans: tuple[Span, ...]  # at least one, which may be empty
    finish_reason: FinishReason
    text: str
    # int32 [P + L - 1, layers, k]: the experts that each input token went to, where a mixture of experts'
    # engine was told to return them
    routed_experts: np.ndarray | None = None

    @classmethod
    def sampled(
        cls,
        prompt_id: int,
        index: int,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        finish_reason: FinishReason,
        weight_versions: Sequence[tuple[int, int]],
        text: str,
        routed_experts: np.ndarray | None = None,
    ) -> "Completion":
        """Return a completion whose tokens the policy has sampled, all of which are trained.

        Args:
            token_ids: int64 [L], the stop token included where one was sampled.
            logprobs: float32 [L].
            weight_versions: (first token, weight version) of each span, ascending, the first from token 0.
        """
        starts = [first for first, _ in weight_versions]
        spans = tuple(
            Span(token_ids[first:end], logprobs[first:end], version)
            for (first, version), end in zip(weight_versions, [*starts[1:], len(token_ids)], strict=True)
        )
        return cls(prompt_id, index, spans, finish_reason, text, routed_experts)

    @cached_property
    def token_ids(self) -> np.ndarray:
        """Of all spans, int64 [L]."""
        return self._join([span.token_ids for span in self.spans])

    @cached_property
    def logprobs(self) -> np.ndarray:
        """Of all spans, float32 [L]; 0 where the policy has not sampled the token."""
        return self._join(
            [
                np.zeros(len(span.token_ids), np.float32) if span.logprobs is None else span.logprobs
                for span in self.spans
            ]
        )

    @cached_property
    def weight_versions(self) -> tuple[tuple[int, int], ...]:
        """(first token, weight version) of each span, ascending."""
        return tuple((first, span.weight_version) for first, _, span in self._places())

    @cached_property
    def untrained(self) -> tuple[tuple[int, int], ...]:
        """(first token, end) of each span that is not trained, ascending."""
        return tuple((first, end) for first, end, span in self._places() if not span.is_trained)

    def _places(self) -> list[tuple[int, int, Span]]:
        ends = np.cumsum([len(span.token_ids) for span in self.spans]).tolist()
        return list(zip([0, *ends[:-1]], ends, self.spans, strict=True))

    @staticmethod
    def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def describe_spans(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return all of `spans` but their tokens and log-probs, in JSON's types."""
    return [
        {
            "length": len(span.token_ids),
            "is_sampled": span.logprobs is not None,
            "weight_version": int(span.weight_version),
            "is_trained": span.is_trained,
        }
        for span in spans
    ]


def build_spans(
    described: Sequence[Mapping[str, Any]], token_ids: np.ndarray, logprobs: np.ndarray
) -> tuple[Span, ...]:
    """Return the spans that `describe_spans` was given, from the tokens and log-probs of all of them."""
    spans: list[Span] = []
    first = 0
    for entry in described:
        tokens = slice(first, first + entry["length"])
        spans.append(
            Span(
                token_ids[tokens],
                logprobs[tokens] if entry["is_sampled"] else None,
                entry["weight_version"],
                entry["is_trained"],
            )
        )
        first = tokens.stop
    return tuple(spans)


@dataclass(frozen=True)
class Reward:
    """The score of one completion."""

    value: float
    # one entry per configured reward; None: it has no opinion on this completion
    parts: Mapping[str, float | None] = field(default_factory=dict)
    outcome: str = "ok"  # "ok", or what went wrong: "timeout", "crash", "error", "memory", "unreachable"
    detail: str = ""  # the message behind an outcome that is not "ok"
    subparts: Mapping[str, float] = field(default_factory=dict)  # REWARD/PART, for the log alone
    # what the first reward that has an opinion read as the answer; "": it found none; None: it does not tell
    answer: str | None = None

    @property
    def first(self) -> float:
        """What the first reward that has an opinion says, unweighted; 0 where none has."""
        return next((value for value in self.parts.values() if value is not None), 0.0)


@dataclass(frozen=True)
class Snapshot:
    """What a part of a run has to keep of the end of a step."""

    state: Mapping[str, Any]  # JSON, the same on all ranks
    files: Callable[[], Mapping[str, bytes]] = dict  # this rank's own, by name within the checkpoint
