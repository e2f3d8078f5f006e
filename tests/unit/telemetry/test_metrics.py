"""Metrics are exact over any split into micro-batches and ranks: a mean of means would fail each of these tests."""

import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.telemetry.metrics import MetricSums

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=5))
def test_any_split_of_the_values_gives_the_metrics_of_all_of_them(chunks):
    merged = MetricSums()
    for chunk in chunks:
        part = MetricSums({"largest": "max", "smallest": "min"})
        part.add_mean("mean", sum(chunk), len(chunk))
        part.add_sum("total", sum(chunk))
        for value in chunk:
            part.add_max("largest", value)
            part.add_min("smallest", value)
        merged.merge(part)
    values = [value for chunk in chunks for value in chunk]
    computed = merged.compute()
    assert computed["total"] == pytest.approx(math.fsum(values), abs=1e-6)
    if values:
        assert computed["mean"] == pytest.approx(math.fsum(values) / len(values), abs=1e-6)
        assert (computed["largest"], computed["smallest"]) == (max(values), min(values))
    else:
        assert set(computed) == {"total"}


def test_unequal_micro_batches_weigh_by_their_counts():
    metrics = MetricSums()
    metrics.add_mean("loss", torch.tensor(9.0), torch.tensor(9))
    metrics.add_mean("loss", torch.tensor(0.0), 1)
    assert metrics.compute() == {"loss": 0.9}


def test_a_name_keeps_its_reduction():
    metrics = MetricSums({"loss": "mean"})
    with pytest.raises(ValueError, match="metric loss: declared as mean, now given as max"):
        metrics.add_max("loss", 1.0)


def test_nan_is_never_hidden():
    metrics = MetricSums()
    for value in (1.0, math.nan, 2.0):
        metrics.add_max("gap", value)
        metrics.add_min("floor", value)
        metrics.add_mean("loss", value, 1)
    computed = metrics.compute()
    assert (computed["gap"], computed["floor"]) == (math.inf, -math.inf)
    assert math.isnan(computed["loss"])


def reduce_on_rank(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    metrics = MetricSums({"loss": "mean", "gap": "max", "low": "min", "tokens": "sum", "nothing": "mean"})
    if rank == 0:  # rank 1 has no data: it must take part and change nothing
        metrics.add_mean("loss", 3.0, 4)
        metrics.add_max("gap", -2.0)
        metrics.add_min("low", 5.0)
        metrics.add_sum("tokens", 2**40 + 1)
    metrics.all_reduce()
    both = MetricSums()
    both.add_mean("loss", [8.0, 1.0][rank], [2, 1][rank])
    both.add_max("gap", [1.0, 7.0][rank])
    both.add_min("low", [1.0, -7.0][rank])
    both.all_reduce()
    different = MetricSums({"loss": "mean"} if rank == 0 else {"loss": "mean", "entropy": "mean"})
    try:
        different.all_reduce()
        message = ""
    except RuntimeError as error:
        message = str(error)
    results[rank] = (metrics.compute(), both.compute(), message)
    dist.destroy_process_group()


def test_all_reduce_over_two_ranks_equals_one_rank_with_all_the_data():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(reduce_on_rank, args=(port, results), nprocs=2)
        assert set(results.keys()) == {0, 1}
        for alone, both, message in results.values():
            assert alone == {"loss": 0.75, "gap": -2.0, "low": 5.0, "tokens": 2**40 + 1}
            assert both == {"loss": 3.0, "gap": 7.0, "low": -7.0}
            assert "entropy (mean)" in message
            assert "declare them on all" in message
