"""A spike is counted, skipped or rolled back from on all ranks alike; the offending prompts are logged;
roll-backs are bounded.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]
LOSSES = Path(__file__).parent / "breaking_losses.py"
JUDGED = [
    "spikes.grad_norm_factor=100",
    "spikes.window=4",
    "checkpoint.every=2",
    "run.steps=8",
    f"algorithm.loss={LOSSES}:",
]


def settings(loss, action):
    return [*JUDGED[:-1], JUDGED[-1] + loss, f"spikes.action={action}"]


@pytest.fixture(scope="module", params=["skip", "roll_back"])
def broken_run(request, run_all):
    """Eight steps as TP2 whose sixth update has a huge gradient."""
    name = f"spike_{request.param}"
    return request.param, run_all(2, {name: settings("huge_in_sixth_call", request.param)})[name]


def test_a_spike_is_not_applied_and_each_step_is_recorded_once(broken_run, rows_of):
    action, folder = broken_run
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["update/spikes"] for row in rows[1:]] == [0, 0, 0, 0, 0, 1 if action == "skip" else 0, 0, 0]
    assert all(
        torch.isfinite(tensor).all() for tensor in load_file(folder / "hf" / "model.safetensors").values()
    )


def test_a_roll_back_goes_to_the_newest_checkpoint_and_on_with_other_prompts(broken_run, rows_of):
    action, folder = broken_run
    if action == "skip":
        assert not (folder / "roll_backs.jsonl").exists()
        return
    (line,) = [json.loads(line) for line in (folder / "roll_backs.jsonl").read_text().splitlines()]
    assert line["step"] == 6 and "gradient norm" in line["cause"] and len(line["prompts"]) == 8
    assert "rolled back to step 4, on with the next prompts (roll-back 1)" in (folder / "log.txt").read_text()
    state = json.loads((folder / "checkpoints" / "step_000008" / "trainer_state.json").read_text())
    # Steps 1 to 6 drew 8 prompts each, and steps 5 to 8 after the roll-back drew others. Two more updates of
    # weights were published: the fifth step's, given up, and the restored ones.
    position = state["parts"]["rollout"]["prompt_position"]
    assert (position, state["roll_backs"], state["weight_version"]) == (8 * 10, 1, 10)


def test_roll_backs_are_bounded(tmp_path):
    command = [
        sys.executable,
        "-m",
        "megagrpo.train",
        "examples/quickstart/quickstart.yaml",
        "parallel.tp=1",
        f"run.dir={tmp_path}",
    ]
    command += [
        "rollout.prompts_per_step=8",
        "rollout.completions_per_prompt=4",
        "evaluation.sets.0.limit=8",
        "evaluation.sets.1.limit=8",
    ]
    command += [*settings("growing", "roll_back"), "spikes.max_roll_backs=2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        "2 roll-backs were made already (spikes.max_roll_backs)" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert len((tmp_path / "roll_backs.jsonl").read_text().splitlines()) == 3
