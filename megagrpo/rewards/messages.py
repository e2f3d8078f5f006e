"""What the pool and its workers say to each other: JSON objects, told apart by `kind`.

Requests are trusted, replies are not: reward code runs in the worker and can write whatever it likes into the
socket. `worker_process.py` reads them strictly, and nothing in them names code.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from megagrpo.errors import UserError
from megagrpo.rewards import frames
from megagrpo.types import Completion, Prompt, build_spans, describe_spans

MAX_ANSWER_CHARACTERS = 200
_STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # how pydantic reads the replies


@dataclass(frozen=True)
class RewardSpec:
    """One configured reward, without its weight."""

    name: str  # registered name, or FILE.py:function / package.module:function
    options: Mapping[str, Any] = field(default_factory=dict)
    # columns of each data set that it is to score, by the field that names the set
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """First message to a worker, answered by Ready or Refused."""

    rewards: tuple[RewardSpec, ...]
    search_path: tuple[str, ...]  # the pool's sys.path: a worker finds the modules that the pool finds


@dataclass(frozen=True)
class Request:
    """Score these completions by one reward; answered by Scores, Failed or Refused."""

    reward: int  # position in Setup.rewards
    prompts: Sequence[Prompt]  # one per completion
    completions: Sequence[Completion]


@dataclass(frozen=True)
class Score:
    """One reward's score of one completion."""

    value: float | None  # finite; None: it has no opinion
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the value, where there are some
    answer: str | None = None  # as in megagrpo.types.Reward, MAX_ANSWER_CHARACTERS at most
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Ready:
    """The rewards are built and warm."""

    kind: Literal["ready"] = "ready"
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Scores:
    """One score per completion of the request."""

    scores: list[Score]
    kind: Literal["scores"] = "scores"
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Failed:
    """The request has no score; the run goes on."""

    outcome: Literal["timeout", "crash", "error", "memory", "unreachable"]  # as in megagrpo.types.Reward
    detail: str
    kind: Literal["failed"] = "failed"
    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Refused:
    """A user's mistake, which ends the run."""

    message: str
    kind: Literal["refused"] = "refused"
    __pydantic_config__ = _STRICT


Reply = Ready | Scores | Failed | Refused


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as JSON. Lone surrogates, which models do write, survive as escapes."""
    return json.dumps(asdict(reply)).encode()


def encode_setup(setup: Setup) -> bytes:
    """Return the setup as JSON; an option that JSON has no type for raises UserError."""
    for spec in setup.rewards:
        for name, value in spec.options.items():
            if problem := describe_unsendable(value):
                raise UserError(f"rewards.functions: options of {spec.name!r}: {name}: {problem}")
    return json.dumps(asdict(setup)).encode()


def decode_setup(body: bytes) -> Setup:
    """Return what `encode_setup` was given."""
    fields = json.loads(body)
    rewards = tuple(RewardSpec(**spec) for spec in fields["rewards"])
    return Setup(rewards, tuple(fields["search_path"]))


def encode_request(request: Request) -> bytes:
    """Return a request as JSON, each prompt once. Routed experts are left out: no reward needs them.

    Raises:
        UserError: a prompt's column holds what JSON has no type for, or the request is too long.
    """
    prompts = list({id(prompt): prompt for prompt in request.prompts}.values())
    place = {id(prompt): number for number, prompt in enumerate(prompts)}
    body = json.dumps(
        {
            "reward": request.reward,
            "prompts": [_describe_prompt(prompt) for prompt in prompts],
            "prompt_of": [place[id(prompt)] for prompt in request.prompts],
            "completions": [_describe_completion(completion) for completion in request.completions],
        }
    ).encode()
    if len(body) > frames.MAX_REQUEST_BYTES:
        raise UserError(
            f"rewards: prompt {prompts[0].id}: its columns and {len(request.completions)} completions are "
            f"{len(body)} bytes; {frames.MAX_REQUEST_BYTES} can be handed to a reward"
        )
    return body


def decode_request(body: bytes) -> Request:
    """Return what `encode_request` was given; tuples in columns come as lists."""
    fields = json.loads(body)
    prompts = [
        Prompt(entry["id"], entry["text"], tuple(entry["token_ids"]), entry["columns"])
        for entry in fields["prompts"]
    ]
    return Request(
        fields["reward"],
        [prompts[number] for number in fields["prompt_of"]],
        [
            Completion(
                prompt_id=entry["prompt_id"],
                index=entry["index"],
                spans=build_spans(
                    entry["spans"],
                    np.frombuffer(b64decode(entry["token_ids"]), np.int64),
                    np.frombuffer(b64decode(entry["logprobs"]), np.float32),
                ),
                finish_reason=entry["finish_reason"],
                text=entry["text"],
            )
            for entry in fields["completions"]
        ],
    )


def describe_unsendable(value: Any) -> str:
    """Return what in `value` can't be handed to a reward, or an empty string.

    JSON's types can: null, booleans, numbers, text, lists (tuples come as lists), and mappings with text as
    keys.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return ""
    if isinstance(value, (list, tuple)):
        return next((problem for entry in value if (problem := describe_unsendable(entry))), "")
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            return f"a mapping with {odd[0]!r} as a key; keys must be text"
        return next((problem for entry in value.values() if (problem := describe_unsendable(entry))), "")
    kind = type(value)
    return (
        f"a {kind.__module__}.{kind.__qualname__} can't be handed to a reward; allowed: null, true, false, "
        "numbers, text, lists, mappings"
    )


def _describe_prompt(prompt: Prompt) -> dict[str, Any]:
    for name, value in prompt.columns.items():
        if problem := describe_unsendable(value):
            raise UserError(f"rewards: prompt {prompt.id}, column {name!r}: {problem}")
    return {
        "id": prompt.id,
        "text": prompt.text,
        "token_ids": [int(token) for token in prompt.token_ids],
        "columns": dict(prompt.columns),
    }


def _describe_completion(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_id": completion.prompt_id,
        "index": int(completion.index),
        "spans": describe_spans(completion.spans),
        "token_ids": b64encode(np.asarray(completion.token_ids, np.int64).tobytes()).decode(),
        "logprobs": b64encode(np.asarray(completion.logprobs, np.float32).tobytes()).decode(),
        "finish_reason": completion.finish_reason,
        "text": completion.text,
    }
