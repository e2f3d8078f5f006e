"""What each sampled group came to, for the curriculum and for the metrics of the sources."""

from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts

RIGHT = 1.0  # a completion is right where the first reward that has an opinion is worth so much at least


@dataclass(frozen=True)
class GroupResult:
    """One group of a step, dropped ones too."""

    prompt_id: int
    source: str
    is_equal: bool  # all its rewards are the same
    reward: float  # the first completion's
    completions: int
    right: int
    tokens: int


def group_results(rollouts: StepRollouts) -> list[GroupResult]:
    """Return one result for each group with a completion, in their order."""
    records: dict[int, list[CompletionRecord]] = {}
    for (group, _), record in rollouts.records.items():
        records.setdefault(group, []).append(record)
    return [
        GroupResult(
            rollouts.prompts[group].id,
            rollouts.prompts[group].source,
            len({record.reward.value for record in own}) == 1,
            own[0].reward.value,
            len(own),
            sum(record.reward.first >= RIGHT for record in own),
            sum(record.length for record in own),
        )
        for group, own in sorted(records.items())
    ]


def metrics_by_source(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Return groups, pass rate and mean length of each source, where there are several."""
    found: dict[str, list[GroupResult]] = {}
    for group in groups:
        found.setdefault(group.source, []).append(group)
    metrics: dict[str, float] = {}
    for source in sorted(found) if len(found) > 1 else ():
        own, place = found[source], f"source/{source.replace('/', '_') or 'none'}"
        completions = sum(group.completions for group in own)
        metrics[f"{place}/groups"] = len(own)
        metrics[f"{place}/pass_rate"] = sum(group.right for group in own) / completions
        metrics[f"{place}/completion_tokens"] = sum(group.tokens for group in own) / completions
    return metrics
