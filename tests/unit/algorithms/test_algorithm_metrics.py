"""Metrics: sums and counts travel, only the end divides."""

import pytest
import torch

from megagrpo.algorithms.metrics import (
    declare_metric,
    finalize_metrics,
    measure,
    merge_metrics,
    summarize_updates,
)

VALUES = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0])


def measure_all(values):
    return {
        name: measure(name, values)
        for name in ("ratio", "ratio_max", "ratio_min", "loss", "rollout_gap/age_1")
    }


def test_mean_is_over_values_and_not_over_micro_batches():
    results = finalize_metrics(merge_metrics([measure_all(VALUES[:1]), measure_all(VALUES[1:])]))
    assert results["ratio"] == pytest.approx(VALUES.mean().item())  # the mean of the two means would be 1.375
    assert (results["ratio_max"], results["ratio_min"], results["loss"]) == (4.0, -5.0, 2.0)


@pytest.mark.parametrize("split", [(2, 3), (0, 5), (5, 0)])
def test_metrics_of_ranks_merge_to_the_metrics_of_all_values(split):
    """A rank without values takes part."""
    ranks = [measure_all(part) for part in VALUES.split(split)]
    assert finalize_metrics(merge_metrics(ranks)) == finalize_metrics(measure_all(VALUES))


def test_metric_without_a_value_is_left_out():
    assert "ratio_max" not in finalize_metrics(measure_all(VALUES[:0]))


def test_clip_fraction_adds_its_sides():
    flags = torch.tensor([True, False, False, False])
    results = finalize_metrics(
        {name: measure(name, flags) for name in ("clip_fraction_low", "clip_fraction_high")}
    )
    assert results["clip_fraction"] == 0.5


def test_metrics_are_detached_float64():
    metric = measure("ratio", torch.ones(3, requires_grad=True))
    assert metric.value.dtype == torch.float64 and not metric.value.requires_grad


def test_undeclared_metric_raises():
    with pytest.raises(KeyError):
        measure("rattio", VALUES)


def test_metric_cannot_be_declared_twice_with_different_reductions():
    declare_metric("ratio", "mean", "actor / old probability of the sampled tokens")
    with pytest.raises(ValueError, match="ratio"):
        declare_metric("ratio", "max", "something else")


def test_losses_of_several_updates_are_reported_by_mean_and_largest():
    """A step of two mini-batches has no larger loss than one of a single one."""
    updates = [{"loss": measure("loss", torch.tensor([value]))} for value in (1.0, 4.0)]
    assert summarize_updates(updates) == {"loss": 2.5, "loss_max": 4.0}
    assert summarize_updates(updates[:1]) == {"loss": 1.0}
    assert summarize_updates([{"ratio": measure("ratio", torch.tensor([1.0]))}] * 2) == {}
