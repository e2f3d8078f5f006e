"""Rollouts in flight as a checkpoint keeps them: one file per rank with the completions that it generated and
their rewards.

    token_ids  int64 [T]    logprobs  float32 [T]    of all completions, one after the other
    metadata   one JSON object per completion, in the same order

A run with another number of ranks deals the files out: what is trained doesn't depend on the rank that holds
it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from megagrpo.rollout.rollouts import SampleKey
from megagrpo.rollout.shares import ScoredCompletions
from megagrpo.types import Completion, Reward


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
        "length": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "weight_versions": completion.weight_versions,
        "text": completion.text,
        "reward": asdict(reward),
    }


def _read_file(path: Path) -> Iterable[tuple[SampleKey, Completion, Reward]]:
    with safe_open(path, "np") as file:
        token_ids, logprobs = file.get_tensor("token_ids"), file.get_tensor("logprobs")
        described = json.loads(file.metadata()["completions"])
    start = 0
    for entry in described:
        tokens = slice(start, start + entry["length"])
        start = tokens.stop
        group, place = entry["key"]
        completion = Completion(
            prompt_id=entry["prompt_id"],
            index=entry["index"],
            token_ids=token_ids[tokens],
            logprobs=logprobs[tokens],
            finish_reason=entry["finish_reason"],
            weight_versions=tuple((first, version) for first, version in entry["weight_versions"]),
            text=entry["text"],
        )
        yield (group, place), completion, Reward(**entry["reward"])
