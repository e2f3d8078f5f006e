"""The simulation of a publish counts what it says: sizes are the models', and a broken plan is found out."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import publish_simulation as simulation
import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="module")
def llama_plan():
    case = next(case for case in simulation.build_cases() if case.model == "Llama-70B")
    sources = [
        source
        for source in case.sources
        if ".layers." not in source.name or source.name.startswith("model.layers.0.")
    ]
    return simulation.PublishPlan(
        sources, case.layout, replace(case.grid, replicas=2), case.head_dim, 2, 2**29
    )


def test_the_models_have_their_published_sizes():
    counts = {
        case.model: sum(prod(source.shape) for source in case.sources) for case in simulation.build_cases()
    }
    # DeepSeek-V3 (arXiv 2412.19437): 671 B without the prediction module. Qwen3 (2505.09388): 235 B. Llama 3
    # (2407.21783): 70 B.
    assert [round(counts[name] / 1e9) for name in ("DeepSeek-V3-like 671B", "Qwen3-235B", "Llama-70B")] == [
        671,
        235,
        71,
    ]


def test_a_plan_is_found_to_cover_everything_once(llama_plan):
    once, received, sent = simulation.check_coverage(llama_plan)
    assert once and sum(received) * 2 == sent.sum()


@pytest.mark.parametrize("change", ["lost", "twice"])
def test_an_element_that_is_lost_or_sent_twice_is_found(llama_plan, monkeypatch, change):
    sends = type(llama_plan).sends
    spoilt = {
        "lost": lambda transfers: transfers[1:],
        "twice": lambda transfers: [*transfers[:1], *transfers],
    }[change]
    monkeypatch.setattr(
        type(llama_plan),
        "sends",
        lambda plan, bucket, rank: (
            spoilt(sends(plan, bucket, rank)) if rank == 3 else sends(plan, bucket, rank)
        ),
    )
    assert not simulation.check_coverage(llama_plan)[0]


def test_overlapping_boxes_are_found():
    assert simulation.are_disjoint([((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 2), (2, 3))])
    assert not simulation.are_disjoint([((0, 2), (0, 2)), ((1, 4), (1, 2))])


def test_the_rows_are_written_as_json(tmp_path):
    command = [
        sys.executable,
        TOOLS / "bench_publish.py",
        "--simulate",
        "--model",
        "llama",
        "--json",
        tmp_path / "rows.json",
    ]
    subprocess.run(command, check=True, timeout=250, capture_output=True)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["model"] == "Llama-70B" and row["bytes_ratio"] == 1.0 and row["elements_covered_once"] is True
    assert row["plan_seconds"] > 0 and row["plan_peak_bytes"] > 0
