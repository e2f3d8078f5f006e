"""A request for rollouts and one rank's share of it: what it holds, what it tells the others, and how a
checkpoint keeps it: one file per rank with the completions that it generated and their rewards.

    token_ids  int64 [T]    logprobs  float32 [T]    of all completions, one after the other
    metadata   one JSON object per completion, in the same order, with the lengths and origins of its spans

A run with another number of ranks deals the files out: what is trained doesn't depend on the rank that holds
it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from megagrpo.config.rollout_sections import DataConfig, RolloutConfig
from megagrpo.errors import UserError
from megagrpo.parallel.background import BackgroundWork
from megagrpo.parallel.plain_data import exchangeable
from megagrpo.rollout.dealing import EngineFailure, LengthEstimates
from megagrpo.rollout.rollouts import CompletionRecord, SampleKey
from megagrpo.types import Completion, Prompt, Reward, SamplingParams, build_spans, describe_spans


@dataclass(frozen=True)
class ScoredCompletions:
    """What a rank has generated and scored."""

    completions: Mapping[SampleKey, Completion]
    rewards: Mapping[SampleKey, Reward]
    generation_seconds: float = 0.0
    scoring_wait_seconds: float = 0.0  # after the last completion, until the last score
    failure: EngineFailure | None = None  # why the engine stopped before the share was complete

    def joined(self, later: "ScoredCompletions") -> "ScoredCompletions":
        """Return this share joined with a later one, whose failure stays."""
        return ScoredCompletions(
            {**self.completions, **later.completions},
            {**self.rewards, **later.rewards},
            self.generation_seconds + later.generation_seconds,
            self.scoring_wait_seconds + later.scoring_wait_seconds,
            later.failure,
        )


@exchangeable
@dataclass(frozen=True)
class ShareMetadata:
    """A share without its tokens."""

    rank: int
    records: list[CompletionRecord]
    generation_seconds: float
    scoring_wait_seconds: float
    failure: EngineFailure | None

    @property
    def groups(self) -> set[int]:
        """The groups that are there."""
        return {record.key[0] for record in self.records}


@exchangeable
@dataclass(frozen=True)
class ShareFailure:
    """A share that failed for another reason than its engine."""

    message: str
    by_user: bool  # a mistake of the user's, told in plain lines


@dataclass(frozen=True)
class RolloutRequest:
    """What is to be generated, the same on all ranks."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    completions_per_prompt: int
    first_index: int = 0  # first completion index of a prompt that has been sampled in this step already
    # estimates for the data set that the prompts are from; gathered rollouts are added to them
    lengths: LengthEstimates = field(default_factory=LengthEstimates)
    by_source: Mapping[str, SamplingParams] = field(
        default_factory=dict
    )  # for sources that are sampled otherwise

    def sampling_of(self, prompt: Prompt) -> SamplingParams:
        """Return how completions of a prompt are sampled."""
        return self.by_source.get(prompt.source, self.sampling)


def sampling_of_run(rollout: RolloutConfig, seed: int, step: int = 0) -> SamplingParams:
    """Return how training completions of a step are sampled."""
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        seed=seed,
        step=step,
    )


def sampling_by_source(data: DataConfig, sampling: SamplingParams) -> dict[str, SamplingParams]:
    """Return the sampling of each source that has values of its own."""
    return {
        each.name: replace(
            sampling,
            max_new_tokens=each.max_new_tokens or sampling.max_new_tokens,
            stop=sampling.stop if each.stop is None else each.stop,
        )
        for each in data.mixture
        if each.max_new_tokens is not None or each.stop is not None
    }


@dataclass
class CompletedRollouts:
    """What came of a request, over all its attempts."""

    outcome: ScoredCompletions | BaseException  # what this rank has
    records: dict[SampleKey, CompletionRecord] = field(default_factory=dict)  # what all ranks have
    missing: list[int] = field(default_factory=list)  # groups that no replica was left for
    failures: dict[int, ShareFailure] = field(default_factory=dict)  # by rank; failures that no engine caused
    is_given_up: bool = False
    generation_seconds: float = 0.0
    scoring_wait_seconds: float = 0.0

    def add(self, everyone: Sequence[ShareMetadata]) -> None:
        """Take in what all ranks tell of an attempt."""
        self.records |= {record.key: record for told in everyone for record in told.records}
        self.generation_seconds += max(told.generation_seconds for told in everyone)
        self.scoring_wait_seconds += max(told.scoring_wait_seconds for told in everyone)


class PendingRollouts:
    """A request whose share runs in a thread of this rank, or is there already."""

    def __init__(
        self,
        request: RolloutRequest,
        share: BackgroundWork[ScoredCompletions] | ScoredCompletions | BaseException,
    ):
        self.request, self._share = request, share

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until this rank's share is there or has failed; say whether it is."""
        return not isinstance(self._share, BackgroundWork) or self._share.wait(seconds)

    def outcome(self) -> ScoredCompletions | BaseException:
        """Wait, and return this rank's share or what it failed with."""
        return self._share.outcome() if isinstance(self._share, BackgroundWork) else self._share


def describe_share(share: ScoredCompletions, rank: int) -> ShareMetadata:
    """Return what the others get to know."""
    records = [
        CompletionRecord(
            key,
            rank,
            len(c.token_ids),
            c.finish_reason,
            share.rewards[key],
            min(span.weight_version for span in [s for s in c.spans if s.is_trained] or c.spans),
            c.untrained,
        )
        for key, c in share.completions.items()
    ]
    return ShareMetadata(rank, records, share.generation_seconds, share.scoring_wait_seconds, share.failure)


def describe_failure(error: BaseException) -> ShareFailure:
    """Return what the others get to know."""
    by_user = isinstance(error, UserError)
    return ShareFailure(str(error) if by_user else f"{type(error).__name__}: {error}", by_user)


def file_name(rank: int) -> str:
    """Return the name of a rank's file within the checkpoint."""
    return f"rollouts_in_flight/rank_{rank:05d}.safetensors"


def pack_share(share: ScoredCompletions) -> bytes:
    """Return the contents of a rank's file."""
    completions = list(share.completions.items())
    described = [_describe(key, completion, share.rewards[key]) for key, completion in completions]
    tensors = {
        "token_ids": np.concatenate(
            [np.zeros(0, np.int64), *(completion.token_ids for _, completion in completions)]
        ),
        "logprobs": np.concatenate(
            [np.zeros(0, np.float32), *(completion.logprobs for _, completion in completions)]
        ),
    }
    return save(tensors, {"completions": json.dumps(described)})


def read_shares(folder: Path, num_files: int, rank: int, world_size: int) -> ScoredCompletions:
    """Return what `rank` of `world_size` holds of the rollouts that `num_files` ranks have saved in
    `folder`.
    """
    completions: dict[SampleKey, Completion] = {}
    rewards: dict[SampleKey, Reward] = {}
    for number in range(rank, num_files, world_size):
        for key, completion, reward in _read_file(folder / file_name(number)):
            completions[key], rewards[key] = completion, reward
    return ScoredCompletions(completions, rewards)


def _describe(key: SampleKey, completion: Completion, reward: Reward) -> dict[str, Any]:
    return {
        "key": key,
        "prompt_id": completion.prompt_id,
        "index": completion.index,
        "spans": describe_spans(completion.spans),
        "finish_reason": completion.finish_reason,
        "text": completion.text,
        "reward": asdict(reward),
    }


def _read_file(path: Path) -> Iterable[tuple[SampleKey, Completion, Reward]]:
    with safe_open(path, "np") as file:
        token_ids, logprobs = file.get_tensor("token_ids"), file.get_tensor("logprobs")
        described = json.loads(file.metadata()["completions"])
    start = 0
    for entry in described:
        tokens = slice(start, start + sum(span["length"] for span in entry["spans"]))
        start = tokens.stop
        group, place = entry["key"]
        completion = Completion(
            prompt_id=entry["prompt_id"],
            index=entry["index"],
            spans=build_spans(entry["spans"], token_ids[tokens], logprobs[tokens]),
            finish_reason=entry["finish_reason"],
            text=entry["text"],
        )
        yield (group, place), completion, Reward(**entry["reward"])
