"""Generates and scores: prompts are dealt over all ranks' engines, only metadata comes back to everyone."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from megagrpo.parallel.groups import ParallelGroups, all_gather_metadata
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.engines.base import Engine
from megagrpo.rollout.rollouts import CompletionRecord, SampleKey, StepRollouts
from megagrpo.types import Completion, Prompt, SamplingParams


class RolloutGenerator:
    """The engines and reward workers of all ranks as one: every rank calls, each does its share."""

    def __init__(self, engine: Engine, rewards: RewardPool, groups: ParallelGroups):
        self.engine, self.rewards, self.groups = engine, rewards, groups

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, completions_per_prompt: int, first_index: int = 0
    ) -> StepRollouts:
        """Return the scored completions of `prompts`, one group each. Collective over all ranks, which pass the same arguments.

        Args:
            first_index: first completion index of a prompt that has been sampled in this step already. A prompt that comes twice in
                `prompts` gets the next indices too, so that its groups differ.
        """
        mine = list(range(len(prompts)))[self.groups.rank :: self.groups.world_size]
        local = self._sample(prompts, mine, sampling, completions_per_prompt, first_index)
        keys = sorted(local)
        scores = self.rewards.score([prompts[group] for group, _ in keys], [local[key] for key in keys])
        records = [
            CompletionRecord(
                key, self.groups.rank, len(c.token_ids), c.finish_reason, score, min(version for _, version in c.weight_versions)
            )
            for key, score in zip(keys, scores, strict=True)
            for c in [local[key]]
        ]
        everyone = [record for rank_records in all_gather_metadata(records) for record in rank_records]
        by_key = {record.key: record for record in sorted(everyone, key=lambda record: record.key)}
        return StepRollouts(list(prompts), by_key, local, completions_per_prompt)

    def _sample(
        self, prompts: Sequence[Prompt], mine: Sequence[int], sampling: SamplingParams, count: int, first_index: int
    ) -> dict[SampleKey, Completion]:
        """Sample this rank's groups; the k-th occurrence of a prompt takes the k-th run of completion indices."""
        seen: Counter[int] = Counter()
        groups_of_occurrence: dict[int, list[int]] = defaultdict(list)
        for group, prompt in enumerate(prompts):
            if group in set(mine):
                groups_of_occurrence[seen[prompt.id]].append(group)
            seen[prompt.id] += 1
        local: dict[SampleKey, Completion] = {}
        for occurrence, groups in groups_of_occurrence.items():
            start = first_index + occurrence * count
            sampled = self.engine.generate([prompts[group] for group in groups], sampling, range(start, start + count))
            for group, completions in zip(groups, sampled, strict=True):
                local |= {(group, place): completion for place, completion in enumerate(completions)}
        return local
