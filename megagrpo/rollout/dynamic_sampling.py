"""DAPO's dynamic sampling (arXiv 2503.14476, Section 3.2, Eq. 11): groups without a signal are replaced by
new prompts.

Differences from the paper: the number of extra rounds is bounded, after which the step trains on the groups
it has; a round draws only as many prompts as are missing. All decisions are functions of all-gathered
rewards, so every rank decides alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.algorithms.advantages.base import find_equal_rewards
from megagrpo.algorithms.overlong import mask_overlong
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.rollout.failed_scores import ScoreCounts, count_scores
from megagrpo.rollout.group_results import GroupResult, group_results
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts, concatenate, select_groups


@dataclass(frozen=True)
class GroupOutcomes:
    """Counts of groups by their rewards."""

    signal: int = 0  # their rewards differ
    solved: int = 0  # all their rewards are the same, and above 0
    repeated: int = 0  # their prompt was drawn for another group too

    def __add__(self, other: "GroupOutcomes") -> "GroupOutcomes":
        """Return the counts of both."""
        return GroupOutcomes(
            self.signal + other.signal, self.solved + other.solved, self.repeated + other.repeated
        )


@dataclass(frozen=True)
class SamplingCounts:
    """What dynamic sampling did in a step."""

    generated_groups: int
    dropped_groups: int  # all rewards equal
    refills: int
    generated_tokens: int
    scores: ScoreCounts = field(default_factory=ScoreCounts)  # over all rounds
    sampled: Sequence[CompletionRecord] = ()  # in all rounds, those of dropped groups too
    outcomes: GroupOutcomes = field(default_factory=GroupOutcomes)  # over all rounds
    groups: Sequence[GroupResult] = ()  # in all rounds
    curriculum: Mapping[str, int] = field(default_factory=dict)  # what it knows of the prompts, by metric


def informative_groups(rollouts: StepRollouts, masks_overlong: bool = False) -> list[int]:
    """Return the groups whose valid completions do not all have the same reward.

    Args:
        masks_overlong: completions that were cut are not valid, as in the loss.
    """
    valid = rollouts.valid
    if masks_overlong:
        valid = mask_overlong(valid, rollouts.cut_by_length)
    equal = find_equal_rewards(rollouts.field_matrix("reward"), valid)
    return [group for group in range(len(rollouts.prompts)) if not equal[group]]


def count_outcomes(rollouts: StepRollouts, masks_overlong: bool = False) -> GroupOutcomes:
    """Return how the groups came out; `masks_overlong` as in `informative_groups`."""
    signal = set(informative_groups(rollouts, masks_overlong))
    rewards: dict[int, float] = {}
    for (group, _), record in rollouts.records.items():
        rewards[group] = max(rewards.get(group, -math.inf), record.reward.value)
    solved = sum(reward > 0 for group, reward in rewards.items() if group not in signal)
    ids = [prompt.id for prompt in rollouts.prompts]
    return GroupOutcomes(len(signal), solved, len(ids) - len(set(ids)))


def collect_groups(
    generate: Callable[[int, int], StepRollouts], wanted: int, config: AlgorithmConfig
) -> tuple[StepRollouts, SamplingCounts]:
    """Return the step's groups.

    Args:
        generate: (number of prompts, refill round) -> their rollouts.
        wanted: groups of a full step.
        config: dynamic sampling on or off, its bound on refills, and whether overlong completions are masked.

    Returns:
        The groups that train (fewer than `wanted`, perhaps none, where the bound was reached), and counts
        over all rounds.

    Raises:
        UserError: no completion of the first round could be scored.
    """
    rollouts = generate(wanted, 0)
    scores = count_scores(rollouts)
    scores.require_any("the step")  # every rank decides alike
    sampled = list(rollouts.records.values())
    outcomes, groups = count_outcomes(rollouts, config.overlong.mask), group_results(rollouts)
    if not config.dynamic_sampling.enabled:
        tokens = count_tokens(sampled)
        return rollouts, SamplingCounts(wanted, 0, 0, tokens, scores, sampled, outcomes, groups)

    def keep(some: StepRollouts) -> StepRollouts:
        return select_groups(some, informative_groups(some, config.overlong.mask))

    kept = keep(rollouts)
    generated, refills = wanted, 0
    while len(kept.prompts) < wanted and refills < config.dynamic_sampling.max_refills:
        refills += 1
        missing = wanted - len(kept.prompts)
        rollouts = generate(missing, refills)
        generated += missing
        scores += count_scores(rollouts)
        outcomes += count_outcomes(rollouts, config.overlong.mask)
        sampled += rollouts.records.values()
        groups += group_results(rollouts)
        kept = concatenate([kept, keep(rollouts)])
    dropped = generated - len(kept.prompts)
    tokens = count_tokens(sampled)
    return kept, SamplingCounts(generated, dropped, refills, tokens, scores, sampled, outcomes, groups)


def count_tokens(records: Sequence[CompletionRecord]) -> int:
    """Return the tokens of all completions."""
    return sum(record.length for record in records)
