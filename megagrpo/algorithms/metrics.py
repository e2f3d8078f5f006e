"""Metrics whose reduction is declared once: sums and counts travel, means are formed at the very end.

A mean of micro-batch means depends on how the batch was split. So every micro-batch returns `Metric`s (a sum
and a count, or an extremum), they are merged over micro-batches and ranks, and only `finalize_metrics`
divides. A name may carry a suffix after a slash (`rollout_gap/age_1`): its specification is that of the part
before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class MetricSpec:
    """How one metric is reduced over tokens (or sequences), micro-batches and ranks, and what it says."""

    reduction: Reduction
    description: str


@dataclass(frozen=True)
class Metric:
    """One partly reduced metric; all values are detached float64 scalars."""

    reduction: Reduction
    # [] sum of the values for `mean` and `sum`, else the extremum (-inf / inf where there was no value)
    value: Tensor
    count: Tensor  # [] number of values

    def merge(self, other: "Metric") -> "Metric":
        """Return the metric of both sets of values together."""
        if self.reduction == "max":
            value = torch.maximum(self.value, other.value)
        elif self.reduction == "min":
            value = torch.minimum(self.value, other.value)
        else:
            value = self.value + other.value
        return Metric(self.reduction, value, self.count + other.count)

    def result(self) -> float | None:
        """Return the number that is logged, or None where there was no value at all."""
        if float(self.count) == 0:
            return None
        return float(self.value / self.count) if self.reduction == "mean" else float(self.value)


METRIC_SPECS: dict[str, MetricSpec] = {
    "loss": MetricSpec("sum", "the minimised value: weighted sum of all terms"),
    "policy_loss": MetricSpec("sum", "weighted sum of the policy term"),
    "kl_loss": MetricSpec("sum", "weighted sum of the KL term, coefficient included"),
    "entropy_loss": MetricSpec("sum", "weighted sum of the entropy term, coefficient included"),
    "ratio": MetricSpec("mean", "actor / old probability of the sampled tokens"),
    "ratio_max": MetricSpec("max", "largest actor / old ratio"),
    "ratio_min": MetricSpec("min", "smallest actor / old ratio"),
    "clip_fraction_low": MetricSpec("mean", "tokens whose gradient the lower bound removed"),
    "clip_fraction_high": MetricSpec("mean", "tokens whose gradient (cispo: weight) the upper bound cut"),
    "clip_fraction_dual": MetricSpec("mean", "tokens whose gradient the dual clip removed"),
    "old_kl": MetricSpec("mean", "k3 estimate of KL(old || actor) per token"),
    "entropy": MetricSpec("mean", "entropy of the actor's next-token distribution"),
    "ref_kl": MetricSpec("mean", "KL(actor || reference) per token by the configured estimator"),
    "actor_rollout_gap": MetricSpec("mean", "|actor - rollout log-prob| per token"),
    "actor_rollout_gap_max": MetricSpec("max", "largest |actor - rollout log-prob|"),
    "rollout_gap": MetricSpec("mean", "|old - rollout log-prob| per token"),
    "rollout_gap_max": MetricSpec("max", "largest |old - rollout log-prob|"),
    "rollout_k3": MetricSpec("mean", "k3 estimate of KL(rollout || old) per token"),
    "rollout_logprob": MetricSpec("mean", "the engine's log-prob of the sampled tokens"),
    "old_logprob": MetricSpec("mean", "the actor's log-prob of the sampled tokens before the update"),
    "correction_weight": MetricSpec("mean", "importance weight of the tokens kept"),
    "correction_weight_max": MetricSpec("max", "largest importance weight"),
    "correction_weight_squared": MetricSpec("mean", "second moment of the importance weight"),
    "correction_masked_fraction": MetricSpec("mean", "tokens that the correction took out of the loss"),
    "correction_rejected_fraction": MetricSpec("mean", "sequences that the correction rejected"),
}


def declare_metric(name: str, reduction: Reduction, description: str) -> None:
    """Declare a metric of a user's loss; a name already declared otherwise raises ValueError."""
    spec = MetricSpec(reduction, description)
    if METRIC_SPECS.setdefault(name, spec) != spec:
        raise ValueError(f"metric {name!r} is already declared as {METRIC_SPECS[name]}")


def measure(name: str, values: Tensor) -> Metric:
    """Reduce `values` (any shape, any dtype, possibly empty) as the specification of `name` says.

    Raises:
        KeyError: the metric was never declared.
    """
    reduction = METRIC_SPECS[name.split("/")[0]].reduction
    values = values.detach().to(torch.float64)
    count = torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    if reduction in ("mean", "sum"):
        return Metric(reduction, values.sum(), count)
    if values.numel() == 0:
        return Metric(reduction, torch.full_like(count, -math.inf if reduction == "max" else math.inf), count)
    return Metric(reduction, values.max() if reduction == "max" else values.min(), count)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several micro-batches; a name that only some of them carry is kept."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def summarize_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Return the mean over several updates of each metric that is a sum over an update's tokens (losses),
    and the largest as `NAME_max`. Other metrics are merged over the tokens of all updates.
    """
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, metric in update.items():
            if metric.reduction == "sum" and (result := metric.result()) is not None:
                values.setdefault(name, []).append(result)
    means = {name: sum(entries) / len(entries) for name, entries in values.items()}
    if len(updates) < 2:
        return means
    return means | {f"{name}_max": max(entries) for name, entries in values.items()}


def finalize_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers that are logged: results of all metrics, and those derived from several of them.

    Derived: `clip_fraction` (low + high + dual), `rollout_perplexity` and `old_perplexity` (exp of the
    negative mean log-prob), and `effective_sample_fraction` = (sum w)^2 / (n sum w^2) of the correction's
    weights. Metrics without a value are left out.
    """
    results = {name: result for name, metric in metrics.items() if (result := metric.result()) is not None}
    clips = [
        results[name]
        for name in ("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual")
        if name in results
    ]
    if clips:
        results["clip_fraction"] = sum(clips)
    for name in ("rollout", "old"):
        if f"{name}_logprob" in results:
            results[f"{name}_perplexity"] = math.exp(min(-results[f"{name}_logprob"], 700.0))
    if results.get("correction_weight_squared", 0.0) > 0:
        results["effective_sample_fraction"] = (
            results["correction_weight"] ** 2 / results["correction_weight_squared"]
        )
    return results
