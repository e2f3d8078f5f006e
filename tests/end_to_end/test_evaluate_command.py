"""`megagrpo evaluate` tells of a checkpoint and of an export, in other layouts, what the run has told."""

import json
import subprocess
import sys

import pytest
from small_runs import QUICKSTART, SMALL

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(500)]

STEPS = 2


def evaluate(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "megagrpo", "evaluate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def run_folder(run_all):
    overrides = ["parallel.tp=2", f"run.steps={STEPS}", "checkpoint.every=1", "optimizer.lr=1e-3"]
    return run_all(2, {"trained": overrides})["trained"]


@pytest.fixture(scope="module")
def told(run_folder):
    return json.loads((run_folder / f"evaluations/step_{STEPS:06d}.json").read_text())["sets"]


def check_same(found, told):
    """The draws are the same, so are the completions: every prompt's scores and lengths."""
    assert found.keys() == told.keys() == {"sampled", "greedy"}
    for name in told:
        assert found[name]["prompts"] == told[name]["prompts"], name
        assert found[name]["metrics"] == told[name]["metrics"]


def test_a_run_keeps_the_results_that_its_metrics_have(run_folder, told, rows_of):
    row = rows_of(run_folder)[-1]
    assert told["sampled"]["metrics"]["mean@4"]["value"] == pytest.approx(row["eval/sampled"], abs=1e-12)
    assert told["sampled"]["metrics"]["pass@4"]["value"] == row["eval/sampled/pass@4"]
    assert len(told["greedy"]["prompts"]) == 32


def test_a_checkpoint_of_two_ranks_evaluates_the_same_on_one(run_folder, told, tmp_path):
    (checkpoint,) = (run_folder / "checkpoints").glob(f"*{STEPS}")
    done = evaluate(QUICKSTART, *SMALL, "parallel.tp=1", f"model.path={checkpoint}", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "evaluations/step_000000.json").read_text())
    check_same(results["sets"], told)
    assert results["model"] == str(checkpoint)
    assert results["sets"]["sampled"]["contamination"] == {"prompts": 0, "of": 32, "ids": []}
    assert "mean@4" in done.stdout and "95 % interval" in done.stdout
    assert list((tmp_path / "completions").glob("held_out_000000_*.jsonl"))


def test_an_export_evaluates_the_same_on_two_ranks_and_compares_with_the_run(run_folder, told, tmp_path):
    export = run_folder / "hf"
    arguments = ("parallel.tp=1", f"model.path={export}", "--nproc", 2, "--out", tmp_path)
    done = evaluate(QUICKSTART, *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    check_same(json.loads((tmp_path / "evaluations/step_000000.json").read_text())["sets"], told)
    compared = evaluate("--compare", run_folder, tmp_path / "evaluations/step_000000.json")
    assert compared.returncode == 0 and "+0.000" in compared.stdout


def test_without_sets_there_is_nothing_to_evaluate(tmp_path):
    done = evaluate(QUICKSTART, "evaluation.sets=[]", "--out", tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("has none, so there is nothing to evaluate")
    assert not (tmp_path / "none").exists()
