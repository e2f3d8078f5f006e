"""The frozen values that pass between the layers.

Shape legend, used everywhere: B sequences, S padded length, T packed tokens, G completions per prompt, N
    prompts,
V vocabulary, Vp = padded V / tp, L tokens of one completion.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
class Completion:
    """One sampled completion, with the log-probs of its tokens under the policy that sampled it."""

    prompt_id: int
    index: int  # 0 <= index < G: which of the group's completions
    token_ids: np.ndarray  # int64 [L], the stop token included where one was sampled
    logprobs: np.ndarray  # float32 [L], at the sampling temperature, over what top-k / top-p kept
    finish_reason: FinishReason
    weight_versions: tuple[tuple[int, int], ...]  # (first token, weight_version) per span, ascending
    text: str
    # int32 [P + L - 1, layers, k]: the experts that each input token went to, where a mixture of experts'
    # engine was told to return them
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True)
class Reward:
    """The score of one completion."""

    value: float
    # one entry per configured reward; None: it has no opinion on this completion
    parts: Mapping[str, float | None] = field(default_factory=dict)
    outcome: str = "ok"  # "ok", or what went wrong: "timeout", "crash", "error", "memory", "unreachable"
    detail: str = ""  # the message behind an outcome that is not "ok"
    subparts: Mapping[str, float] = field(default_factory=dict)  # REWARD/PART, for the log alone


@dataclass(frozen=True)
class Snapshot:
    """What a part of a run has to keep of the end of a step."""

    state: Mapping[str, Any]  # JSON, the same on all ranks
    files: Callable[[], Mapping[str, bytes]] = dict  # this rank's own, by name within the checkpoint
