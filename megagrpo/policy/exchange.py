"""Moves completions from the ranks that generated them straight to the ranks that train them.

Who sends what to whom follows from metadata that all ranks hold, so sizes need not be exchanged: one
all-to-all of token ids and one of log-probs, nothing is gathered anywhere.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.rollout.rollouts import CompletionRecord, SampleKey
from megagrpo.types import Completion

Tokens = tuple[np.ndarray, np.ndarray]  # (token ids int64 [L], rollout log-probs float32 [L])


def exchange_completions(
    records: Sequence[CompletionRecord],
    destinations: Mapping[SampleKey, Sequence[int]],
    local: Mapping[SampleKey, Completion],
) -> dict[SampleKey, Tokens]:
    """Return the token data of the completions destined for this rank. Collective over all ranks.

    Args:
        records: the completions that move, in the same order on all ranks.
        destinations: the ranks that need each of them.
        local: the completions that this rank generated.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = [
        [r for r in records if r.source_rank == rank and target in destinations[r.key]]
        for target in range(world_size)
    ]
    incoming = [
        [r for r in records if r.source_rank == source and rank in destinations[r.key]]
        for source in range(world_size)
    ]
    send_sizes = [sum(record.length for record in part) for part in outgoing]
    receive_sizes = [sum(record.length for record in part) for part in incoming]
    order = [record.key for part in outgoing for record in part]
    token_ids = _all_to_all([local[key].token_ids for key in order], torch.int64, send_sizes, receive_sizes)
    logprobs = _all_to_all([local[key].logprobs for key in order], torch.float32, send_sizes, receive_sizes)
    received: dict[SampleKey, Tokens] = {}
    offset = 0
    for record in (record for part in incoming for record in part):
        rows = slice(offset, offset + record.length)
        received[record.key] = (token_ids[rows], logprobs[rows])
        offset += record.length
    return received


def _all_to_all(
    parts: Sequence[np.ndarray], dtype: torch.dtype, send_sizes: list[int], receive_sizes: list[int]
) -> np.ndarray:
    send = torch.as_tensor(np.concatenate(parts) if parts else np.empty(0), dtype=dtype)
    received = torch.empty(sum(receive_sizes), dtype=dtype)
    dist.all_to_all_single(received, send, receive_sizes, send_sizes)
    return received.numpy()
