"""What the prompts of one held-out set came to, and all that is told of it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megagrpo.evaluation.intervals import bootstrap_interval
from megagrpo.evaluation.prompt_digests import prompt_digest
from megagrpo.evaluation.score_metrics import is_mean_over_prompts, measure_scores
from megagrpo.rollout.failed_scores import ScoreCounts, count_scores, failed_fractions
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.telemetry.names import STANDARD_ERROR


@dataclass(frozen=True)
class PromptOutcome:
    """The completions of one prompt, in the order of their draws."""

    id: int
    digest: str
    source: str
    scores: tuple[float, ...]  # by the first reward that has an opinion
    answers: tuple[str | None, ...]  # as in Reward
    tokens: tuple[int, ...]
    cut: int  # completions that the length limit ended


@dataclass(frozen=True)
class SetOutcome:
    """One held-out set, sampled and scored."""

    name: str
    metric_names: Sequence[str]
    prompts: Sequence[PromptOutcome]
    counts: ScoreCounts
    sampling: Mapping[str, Any] = field(default_factory=dict)  # how it was sampled, for the record

    @property
    def scores(self) -> list[Sequence[float]]:
        """Of each prompt."""
        return [prompt.scores for prompt in self.prompts]

    def metrics(self) -> dict[str, float]:
        """Return all numbers: `eval/NAME`, the mean over all completions (mean@k), and those below it."""
        place = f"eval/{self.name}"
        total = sum(map(len, self.scores))
        sources = self._by_source()
        return {
            place: sum(map(sum, self.scores)) / total,
            f"{place}/{STANDARD_ERROR}": standard_error([_mean(scores) for scores in self.scores]),
            **{f"{place}/{key}": value for key, value in self._measure(self.prompts).items()},
            **failed_fractions(place, self.counts),
            f"{place}/completion_tokens": sum(sum(prompt.tokens) for prompt in self.prompts) / total,
            f"{place}/cut_by_length_fraction": sum(prompt.cut for prompt in self.prompts) / total,
            **{
                f"{place}/source/{source.replace('/', '_')}": _mean([_mean(each.scores) for each in prompts])
                for source, prompts in sources.items()
                if len(sources) > 1
            },
        }

    def describe(self) -> dict[str, Any]:
        """Return the results as JSON holds them: each metric with the interval that it has over prompts, the
        sources, and every prompt.
        """
        return {
            "sampling": dict(self.sampling),
            "metrics": self._with_intervals(self.prompts),
            "sources": {source: self._with_intervals(some) for source, some in self._by_source().items()},
            **self._describe_lengths(),
            "failed": dict(self.counts.outcomes),
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }

    def _measure(self, prompts: Sequence[PromptOutcome]) -> dict[str, float]:
        return measure_scores(
            self.metric_names, [each.scores for each in prompts], [each.answers for each in prompts]
        )

    def _with_intervals(self, prompts: Sequence[PromptOutcome]) -> dict[str, dict[str, float]]:
        k = min(len(prompt.scores) for prompt in prompts)
        values = {f"mean@{k}": [_mean(prompt.scores) for prompt in prompts]}
        ours = [name for name in self.metric_names if is_mean_over_prompts(name)]
        for prompt in prompts:
            for key, value in measure_scores(ours, [prompt.scores], [prompt.answers]).items():
                values.setdefault(key, []).append(value)
        described = {key: _describe(each) for key, each in values.items()}
        others = {key: {"value": value} for key, value in self._measure(prompts).items()}
        return {f"mean@{k}": described[f"mean@{k}"], **others, **described}

    def _describe_lengths(self) -> dict[str, Any]:
        tokens = sorted(length for prompt in self.prompts for length in prompt.tokens)
        return {
            "completions": len(tokens),
            "tokens": {
                "mean": _mean(tokens),
                "median": statistics.median(tokens),
                "longest": tokens[-1],
            },
            "cut_by_length_fraction": sum(prompt.cut for prompt in self.prompts) / len(tokens),
        }

    def _by_source(self) -> dict[str, list[PromptOutcome]]:
        found: dict[str, list[PromptOutcome]] = {}
        for prompt in self.prompts:
            found.setdefault(prompt.source, []).append(prompt)
        return {source: found[source] for source in sorted(found)}


def read_outcome(
    name: str, metric_names: Sequence[str], rollouts: StepRollouts, sampling: Mapping[str, Any]
) -> SetOutcome:
    """Return what the rollouts of a set came to, the same on every rank."""
    prompts = []
    for group, prompt in enumerate(rollouts.prompts):
        records = [
            rollouts.records[group, place]
            for place in range(rollouts.completions_per_prompt)
            if (group, place) in rollouts.records
        ]
        prompts.append(
            PromptOutcome(
                prompt.id,
                prompt_digest(prompt.text),
                prompt.source,
                tuple(record.reward.first for record in records),
                tuple(record.reward.answer for record in records),
                tuple(record.length for record in records),
                sum(record.finish_reason == "length" for record in records),
            )
        )
    return SetOutcome(name, metric_names, prompts, count_scores(rollouts), sampling)


def standard_error(values: Sequence[float]) -> float:
    """Return that of the mean of `values`, from their own spread; 0 for one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _describe(values: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap_interval(values)
    return {"value": _mean(values), "low": low, "high": high}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
