"""Whole runs with rollout engines that are servers, shared by both ranks."""

import json

import psutil
import pytest

from megagrpo.config.engine_checks import EMBEDDED_ENGINES
from megagrpo.rollout.engines import ENGINES

pytestmark = [pytest.mark.engines, pytest.mark.end_to_end, pytest.mark.timeout(900)]

NAMES = [name for name in ENGINES.names() if name not in EMBEDDED_ENGINES]
STEPS = 15
FULL_BATCH = ["rollout.prompts_per_step=32", "rollout.completions_per_prompt=8"]  # the quickstart's own


@pytest.fixture(scope="module", params=NAMES)
def run_folder(request, run_all):
    overrides = [f"engine.name={request.param}", f"run.steps={STEPS}", "evaluation.every=0", *FULL_BATCH]
    return run_all(2, {request.param: overrides})[request.param]


def test_the_engine_agrees_with_the_actor_in_every_step(run_folder, rows_of):
    """Both ranks' completions come from one server; 2e-5 is what float32 rounding leaves between two ways to compute the same."""
    rows = rows_of(run_folder)[1:]
    assert len(rows) == STEPS
    assert all(row["rollout/max_logprob_gap"] <= 2e-5 for row in rows)
    assert [row["rollout/weight_version"] for row in rows] == list(range(STEPS))


def test_the_run_learns(run_folder):
    """From about 0.28; the embedded engine's runs are over 0.8 after so many steps."""
    sampled = json.loads((run_folder / "summary.json").read_text())["eval"]["sampled"]
    assert sampled["last"] > sampled["first"] + 0.3, sampled


def test_one_server_was_started_and_none_is_left(run_folder):
    (log,) = (run_folder / "engines").glob("*.log")  # the server's standard output
    opened = {process.pid: process.info["open_files"] or () for process in psutil.process_iter(["open_files"])}
    assert not [pid for pid, files in opened.items() if str(log) in [file.path for file in files]]
