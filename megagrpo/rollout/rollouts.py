"""What a step's rollouts came to: metadata that every rank holds, token data that only the generating rank
holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megagrpo.parallel.plain_data import exchangeable
from megagrpo.types import Completion, FinishReason, Prompt, Reward

SampleKey = tuple[int, int]  # (group, place within the group)


exchangeable(Reward)  # part of a record


@exchangeable
@dataclass(frozen=True)
class CompletionRecord:
    """What all ranks know of one completion."""

    key: SampleKey
    source_rank: int  # the rank that generated it and holds its tokens
    length: int  # tokens, the stop token included
    finish_reason: FinishReason
    reward: Reward
    weight_version: int  # the oldest that sampled any of its trained tokens
    # (first token, end) of what the loss leaves out, ascending
    untrained: tuple[tuple[int, int], ...] = ()

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return self.length - sum(end - first for first, end in self.untrained)


@dataclass(frozen=True)
class StepRollouts:
    """The groups of one step, N prompts with G completions each."""

    prompts: Sequence[Prompt]  # by group
    records: Mapping[SampleKey, CompletionRecord]  # one for every completion, in the order of the keys
    local: Mapping[SampleKey, Completion] = field(repr=False)  # those that this rank generated
    completions_per_prompt: int = 0
    generation_seconds: float = 0.0  # the slowest rank's
    scoring_wait_seconds: float = 0.0  # the longest wait of any rank for its last score

    def matrix(
        self, values: Mapping[SampleKey, float], fill: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        """Lay one number per completion out as [N, G]; missing completions get `fill`."""
        matrix = torch.full((len(self.prompts), self.completions_per_prompt), fill, dtype=dtype)
        for (group, place), value in values.items():
            matrix[group, place] = value
        return matrix

    def field_matrix(self, name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Lay a field of the records out as [N, G]: `length`, `trained_tokens` or `reward`."""
        read = (
            (lambda record: record.reward.value)
            if name == "reward"
            else (lambda record: getattr(record, name))
        )
        return self.matrix({key: read(record) for key, record in self.records.items()}, dtype=dtype)

    def samples(self) -> list[tuple[Prompt, Completion, Reward]]:
        """Return the completions that this rank generated, with their prompts and rewards."""
        return [
            (self.prompts[key[0]], completion, self.records[key].reward)
            for key, completion in self.local.items()
        ]

    @property
    def cut_by_length(self) -> torch.Tensor:
        """Whether the length limit ended the completion, bool [N, G]."""
        return self.matrix(
            {key: record.finish_reason == "length" for key, record in self.records.items()}, dtype=torch.bool
        )

    @property
    def valid(self) -> torch.Tensor:
        """Whether the completion exists, was not aborted and has a token that is trained, bool [N, G]."""
        return self.matrix(
            {
                key: record.finish_reason != "abort" and record.trained_tokens > 0
                for key, record in self.records.items()
            },
            dtype=torch.bool,
        )

    def reward_parts(self) -> tuple[list[str], torch.Tensor]:
        """Return the reward names and their values [N, G, R]; 0 where a reward has no opinion."""
        names = list(next(iter(self.records.values())).reward.parts)
        parts = [
            self.matrix({key: record.reward.parts[name] or 0.0 for key, record in self.records.items()})
            for name in names
        ]
        return names, torch.stack(parts, dim=2)


def select_groups(rollouts: StepRollouts, groups: Sequence[int]) -> StepRollouts:
    """Return the given groups only, renumbered from 0 in the given order."""
    new_group = {group: number for number, group in enumerate(groups)}

    def renumber(entries: Mapping[SampleKey, object]) -> dict:
        return {
            (new_group[group], place): value
            for (group, place), value in entries.items()
            if group in new_group
        }

    records = {key: replace(record, key=key) for key, record in sorted(renumber(rollouts.records).items())}
    return replace(
        rollouts,
        prompts=[rollouts.prompts[group] for group in groups],
        records=records,
        local=renumber(rollouts.local),
    )


def concatenate(parts: Sequence[StepRollouts]) -> StepRollouts:
    """Return all groups of several rollouts, numbered on."""
    prompts: list[Prompt] = []
    records: dict[SampleKey, CompletionRecord] = {}
    local: dict[SampleKey, Completion] = {}
    for part in parts:
        offset = len(prompts)
        for (group, place), record in part.records.items():
            key = (group + offset, place)
            records[key] = replace(record, key=key)
        local |= {(group + offset, place): completion for (group, place), completion in part.local.items()}
        prompts += part.prompts
    return StepRollouts(
        prompts,
        records,
        local,
        parts[0].completions_per_prompt,
        generation_seconds=sum(part.generation_seconds for part in parts),
        scoring_wait_seconds=sum(part.scoring_wait_seconds for part in parts),
    )
