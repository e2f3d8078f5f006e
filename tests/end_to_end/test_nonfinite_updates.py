"""A loss that is not finite on one replica skips the update on all, is counted, and stops the run when it
repeats.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]
LOSSES = Path(__file__).parent / "breaking_losses.py"


def run_dp2(loss, folder, *overrides):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    command += [
        "-m",
        "megagrpo.train",
        "examples/quickstart/quickstart.yaml",
        "parallel.tp=1",
        f"algorithm.loss={LOSSES}:{loss}",
    ]
    command += [
        "rollout.prompts_per_step=8",
        "evaluation.sets.0.limit=8",
        "evaluation.sets.1.limit=8",
        f"run.dir={folder}",
        *overrides,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )


def test_one_bad_update_is_skipped_by_all_ranks_and_the_run_goes_on(tmp_path, rows_of):
    done = run_dp2("nan_once_on_last_rank", tmp_path / "run", "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED 1 (not finite)" in done.stdout
    first, second = rows_of(tmp_path / "run")[1:]
    assert (first["update/skipped_nonfinite"], second["update/skipped_nonfinite"]) == (1, 0)
    weights = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_bad_updates_in_a_row_stop_the_run(tmp_path):
    done = run_dp2(
        "always_nan_on_last_rank",
        tmp_path / "run",
        "run.steps=5",
        "run.max_nonfinite_steps=2",
        "checkpoint.every=50",
    )
    assert done.returncode != 0
    assert "step 2: 2 updates in a row had a loss or gradient that is not finite" in done.stdout + done.stderr
    assert "step 1/5" in done.stdout and "step 2/5" not in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "manifest.json").exists()
