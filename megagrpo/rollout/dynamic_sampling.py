"""DAPO's dynamic sampling (arXiv 2503.14476, Section 3.2, Eq. 11): groups without a signal are replaced by
new prompts.

Differences from the paper: the number of extra rounds is bounded, after which the step trains on the groups
    it has; a round draws
only as many prompts as are missing. All decisions are functions of all-gathered rewards, so every rank
decides alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from megagrpo.algorithms.advantages.base import find_equal_rewards
from megagrpo.config.algorithm import DynamicSamplingConfig
from megagrpo.rollout.failed_scores import ScoreCounts, count_scores
from megagrpo.rollout.rollouts import StepRollouts, concatenate, select_groups


@dataclass(frozen=True)
class SamplingCounts:
    """What dynamic sampling did in a step."""

    generated_groups: int
    dropped_groups: int  # all rewards equal
    refills: int
    generated_tokens: int
    scores: ScoreCounts = field(default_factory=ScoreCounts)  # of all rounds


def informative_groups(rollouts: StepRollouts) -> list[int]:
    """Return the groups whose valid completions do not all have the same reward."""
    equal = find_equal_rewards(rollouts.field_matrix("reward"), rollouts.valid)
    return [group for group in range(len(rollouts.prompts)) if not equal[group]]


def collect_groups(
    generate: Callable[[int, int], StepRollouts], wanted: int, config: DynamicSamplingConfig
) -> tuple[StepRollouts, SamplingCounts]:
    """Return the step's groups.

    Args:
        generate: (number of prompts, refill round) -> their rollouts.
        wanted: groups of a full step.
        config: on or off, and the bound on refills.

    Returns:
        The groups that train (fewer than `wanted`, perhaps none, where the bound was reached), and counts
        over all rounds.

    Raises:
        UserError: no completion of the first round could be scored.
    """
    rollouts = generate(wanted, 0)
    scores = count_scores(rollouts)
    scores.require_any("the step")  # every rank decides alike
    tokens = sum(record.length for record in rollouts.records.values())
    if not config.enabled:
        return rollouts, SamplingCounts(wanted, 0, 0, tokens, scores)
    kept = select_groups(rollouts, informative_groups(rollouts))
    generated, refills = wanted, 0
    while len(kept.prompts) < wanted and refills < config.max_refills:
        refills += 1
        missing = wanted - len(kept.prompts)
        rollouts = generate(missing, refills)
        generated += missing
        scores += count_scores(rollouts)
        tokens += sum(record.length for record in rollouts.records.values())
        kept = concatenate([kept, select_groups(rollouts, informative_groups(rollouts))])
    return kept, SamplingCounts(generated, generated - len(kept.prompts), refills, tokens, scores)
