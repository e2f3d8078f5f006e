"""The mini-batches of a step: what each optimizer update trains, planned alike on every rank, with the tokens
of this rank's replica.

Tokens move from the ranks that generated them straight to the ranks that train them. Who sends what to whom
follows from metadata that all ranks hold, so sizes need not be exchanged: one all-to-all of token ids and one
of log-probs, nothing is gathered anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.parallel.groups import ParallelGroups
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.batch import MicroBatch, MicroBatchBuilder, TrainSample
from megagrpo.policy.microbatches import (
    MicroBatchPlan,
    PackingRules,
    SampleSize,
    count_tokens,
    plan_microbatches,
)
from megagrpo.rollout.rollouts import CompletionRecord, SampleKey, StepRollouts
from megagrpo.types import Completion

Tokens = tuple[np.ndarray, np.ndarray]  # (token ids int64 [L], rollout log-probs float32 [L])


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer update."""

    groups: Sequence[int]
    keys: Sequence[SampleKey]  # name the samples that are trained, on all replicas
    batches: Sequence[MicroBatch]  # those of this rank's replica
    computed_tokens: int = 0  # all replicas together, padding included
    padding_tokens: int = 0


@dataclass(frozen=True)
class MiniBatchBuilder:
    """Plans the updates of a pass and fetches what they train."""

    groups: ParallelGroups
    layout: ParallelLayout
    builder: MicroBatchBuilder
    rules: PackingRules
    hidden_size: int

    def build(self, rollouts: StepRollouts, trains: torch.Tensor, num_mini_batches: int) -> list[MiniBatch]:
        """Plan all updates of a pass and fetch the tokens that this replica trains. Collective over all
        ranks.

        Args:
            rollouts: the groups.
            trains: [N, G], bool: the completions that are computed.
            num_mini_batches: consecutive shares of the groups, one for each update.
        """
        plans: list[tuple[Sequence[int], list[SampleKey], list[list[MicroBatchPlan]], tuple[int, int]]] = []
        trained = trains.numpy()  # a tensor takes microseconds for each element that is asked for
        for chunk in np.array_split(np.arange(len(rollouts.prompts)), num_mini_batches):
            chosen = set(chunk.tolist())
            keys = [key for key in rollouts.records if key[0] in chosen and trained[key]]
            sizes = [
                SampleSize(key[0], len(rollouts.prompts[key[0]].token_ids), rollouts.records[key].length)
                for key in keys
            ]
            plan = plan_microbatches(sizes, self.layout.dp, self.rules, self.hidden_size) if keys else []
            plans.append((chunk.tolist(), keys, plan, count_tokens(plan, sizes, self.rules)))
        samples = self._fetch(rollouts, plans)
        return [
            MiniBatch(
                chunk,
                keys,
                [
                    self.builder.build(micro, lambda i, keys=keys: samples[keys[i]], len(keys))
                    for micro in plan[self.groups.dp_rank]
                ],
                *counts,
            )
            if plan
            else MiniBatch(chunk, keys, [])
            for chunk, keys, plan, counts in plans
        ]

    def _fetch(self, rollouts: StepRollouts, plans: list) -> dict[SampleKey, TrainSample]:
        replicas = [self.layout.ranks_of_replica(dp) for dp in range(self.layout.dp)]
        destinations = {
            keys[index]: replicas[dp]
            for _, keys, plan, _ in plans
            for dp, micro_batches in enumerate(plan)
            for micro in micro_batches
            for tree in micro
            for index in tree.samples
        }
        records = [record for key, record in rollouts.records.items() if key in destinations]
        tokens = exchange_completions(records, destinations, rollouts.local)
        return {
            key: TrainSample(
                key, rollouts.prompts[key[0]].token_ids, *data, untrained=rollouts.records[key].untrained
            )
            for key, data in tokens.items()
        }


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
    outgoing, incoming = sort_by_peer(records, destinations, dist.get_rank(), dist.get_world_size())
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


def sort_by_peer(
    records: Sequence[CompletionRecord],
    destinations: Mapping[SampleKey, Sequence[int]],
    rank: int,
    world_size: int,
) -> tuple[list[list[CompletionRecord]], list[list[CompletionRecord]]]:
    """Return what `rank` sends to each rank, and what it receives from each, in the order of `records`.

    One pass over the records: a pass for each rank would take seconds in a world of thousands.
    """
    outgoing: list[list[CompletionRecord]] = [[] for _ in range(world_size)]
    incoming: list[list[CompletionRecord]] = [[] for _ in range(world_size)]
    for record in records:
        targets = destinations[record.key]
        if record.source_rank == rank:
            for target in targets:
                outgoing[target].append(record)
        if rank in targets:
            incoming[record.source_rank].append(record)
    return outgoing, incoming


def _all_to_all(
    parts: Sequence[np.ndarray], dtype: torch.dtype, send_sizes: list[int], receive_sizes: list[int]
) -> np.ndarray:
    send = torch.as_tensor(np.concatenate(parts) if parts else np.empty(0), dtype=dtype)
    received = torch.empty(sum(receive_sizes), dtype=dtype)
    dist.all_to_all_single(received, send, receive_sizes, send_sizes)
    return received.numpy()
