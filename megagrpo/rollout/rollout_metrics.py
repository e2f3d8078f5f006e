"""The numbers that a step's rollouts are reported by."""

import statistics
from collections.abc import Sequence

from megagrpo.rollout.dynamic_sampling import SamplingCounts, count_tokens
from megagrpo.rollout.failed_scores import failed_fractions, mean_parts
from megagrpo.rollout.group_results import metrics_by_source
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.telemetry import names


def compute_rollout_metrics(
    rollouts: StepRollouts, counts: SamplingCounts, weight_version: int
) -> dict[str, float]:
    """Return rewards, lengths, versions and counts of one step, the same on all ranks.

    `reward/...` and `rollout/...` are of all that was sampled, `update/...` of the groups that train.

    Args:
        rollouts: the groups that train.
        counts: what it took to find them, with the records of all that was sampled.
        weight_version: of the actor that is about to train on them.
    """
    records = list(rollouts.records.values())
    metrics: dict[str, float] = {
        names.GENERATED_TOKENS: counts.generated_tokens,
        names.GROUPS: counts.generated_groups,
        names.SIGNAL_GROUPS: counts.outcomes.signal,
        names.SOLVED_GROUPS: counts.outcomes.solved,
        names.REPEATED_PROMPTS: counts.outcomes.repeated,
        "rollout/dropped_groups": counts.dropped_groups,
        "rollout/refills": counts.refills,
        **failed_fractions("reward", counts.scores),
        "rollout/weight_version": min((record.weight_version for record in records), default=weight_version),
        **counts.curriculum,
        names.GENERATION_SECONDS: rollouts.generation_seconds,
        names.SCORING_WAIT_SECONDS: rollouts.scoring_wait_seconds,
    }
    if records:
        ages = [weight_version - record.weight_version for record in records]
        metrics["rollout/policy_age_mean"], metrics["rollout/policy_age_max"] = (
            sum(ages) / len(ages),
            max(ages),
        )
        metrics[names.TRAINED_REWARD] = mean_reward(records)
        metrics["update/completion_tokens"] = count_tokens(records) / len(records)
    if counts.sampled:
        sampled = counts.sampled
        metrics[names.REWARD] = mean_reward(sampled)
        metrics[names.REWARD_STD] = statistics.pstdev(record.reward.value for record in sampled)
        metrics |= mean_parts([record.reward for record in sampled])
        metrics[names.LENGTH] = count_tokens(sampled) / len(sampled)
        metrics |= metrics_by_source(counts.groups)
        cut = sum(record.finish_reason == "length" for record in sampled)
        metrics[names.CUT_FRACTION] = cut / len(sampled)
    return metrics


def mean_reward(records: Sequence[CompletionRecord]) -> float:
    """Return the mean reward of some completions."""
    return sum(record.reward.value for record in records) / len(records)
