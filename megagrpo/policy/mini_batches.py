"""The mini-batches of a step: what each optimizer update trains, planned alike on every rank, with the tokens
of this rank's replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megagrpo.parallel.groups import ParallelGroups
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.batch import MicroBatch, MicroBatchBuilder, TrainSample
from megagrpo.policy.exchange import exchange_completions
from megagrpo.policy.microbatches import MicroBatchPlan, PackingRules, SampleSize, plan_microbatches
from megagrpo.rollout.rollouts import SampleKey, StepRollouts


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer update."""

    groups: Sequence[int]
    keys: Sequence[SampleKey]  # of the samples that are trained, on all replicas
    batches: Sequence[MicroBatch]  # of this rank's replica


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
        plans: list[tuple[Sequence[int], list[SampleKey], list[list[MicroBatchPlan]]]] = []
        for chunk in np.array_split(np.arange(len(rollouts.prompts)), num_mini_batches):
            keys = [key for key in rollouts.records if key[0] in set(chunk.tolist()) and trains[key]]
            sizes = [
                SampleSize(key[0], len(rollouts.prompts[key[0]].token_ids), rollouts.records[key].length)
                for key in keys
            ]
            plan = plan_microbatches(sizes, self.layout.dp, self.rules, self.hidden_size) if keys else []
            plans.append((chunk.tolist(), keys, plan))
        samples = self._fetch(rollouts, plans)
        return [
            MiniBatch(
                chunk,
                keys,
                [
                    self.builder.build(micro, lambda i, keys=keys: samples[keys[i]], len(keys))
                    for micro in plan[self.groups.dp_rank]
                ],
            )
            if plan
            else MiniBatch(chunk, keys, [])
            for chunk, keys, plan in plans
        ]

    def _fetch(self, rollouts: StepRollouts, plans: list) -> dict[SampleKey, TrainSample]:
        destinations = {
            keys[index]: self.layout.ranks_of_replica(dp)
            for _, keys, plan in plans
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
