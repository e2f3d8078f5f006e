"""An end that all ranks meet alike loses nothing that is trained: the last finished step is saved first."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from small_runs import QUICKSTART, SMALL

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]


@pytest.fixture
def run_alone(tmp_path):
    """A function: overrides -> (exit code, output) of one rank's run in `tmp_path`/run."""

    def run(*overrides: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "megagrpo.train", QUICKSTART, *SMALL, "parallel.tp=1"]
        command += [f"run.dir={tmp_path / 'run'}", *overrides]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def saved_steps(folder):
    """Return the steps of complete checkpoints, and of their trainer states."""
    states = sorted(folder.glob("checkpoints/step_*/trainer_state.json"))
    assert all((path.parent / "manifest.json").exists() for path in states)
    return [json.loads(path.read_text())["step"] for path in states]


def test_a_reward_that_raises_in_step_three_leaves_step_two_saved(run_alone, tmp_path):
    """The evaluation before the first step scores 32 * 4 + 32 completions, each step 32."""
    (tmp_path / "user.py").write_text(
        "scored = 0\n"
        "def reward(prompts, completions):\n"
        "    global scored\n"
        "    scored += len(completions)\n"
        "    if scored > 160 + 2 * 32: raise RuntimeError('out of answers')\n"
        "    return [float(index % 2) for index in range(len(completions))]\n"
    )
    code, output = run_alone(
        f"rewards.functions.0.name={tmp_path / 'user.py'}:reward", "run.steps=9", "checkpoint.every=50"
    )
    assert code == 2 and "out of answers" in output
    assert saved_steps(tmp_path / "run") == [2]


def test_a_rank_that_fails_while_a_save_is_under_way_ends_the_save_first(run_alone, tmp_path):
    """An error that no other rank shares, on a disk that takes two seconds for a checkpoint."""
    (tmp_path / "user.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from megagrpo.algorithms.losses import LossOutput, register_loss\n"
        "@register_loss('breaks_while_saving')\n"
        "def breaks_while_saving(inputs):\n"
        "    from megagrpo.checkpoint import writer\n"
        "    write = vars(writer).setdefault('write_at_once', writer.ShardWriter._write_shards)\n"
        "    writer.ShardWriter._write_shards = lambda self: (time.sleep(2.0), write(self))\n"
        f"    if list(Path({str(tmp_path)!r}).glob('run/checkpoints/*.partial')):\n"
        "        raise RuntimeError('broken in the midst of it')\n"
        "    return LossOutput(-inputs.advantages * inputs.actor_logprobs)\n"
    )
    loss = f"algorithm.loss={tmp_path / 'user.py'}:breaks_while_saving"
    code, output = run_alone(loss, "algorithm.preset=null", "run.steps=9", "checkpoint.every=1")
    assert code == 1 and "broken in the midst of it" in output
    assert saved_steps(tmp_path / "run") == [1]


def test_a_gap_that_ends_the_run_changes_no_checkpoint(run_alone, tmp_path):
    code, output = run_alone("run.steps=2", "checkpoint.every=1", "run.export_hf=false")
    assert code == 0, output
    code, output = run_alone("run.steps=3", "checkpoint.every=50", "rollout.logprob_gap.stop_above=1e-12")
    assert code == 2 and "step 3: engine and actor log-probs differ by up to" in output
    assert saved_steps(tmp_path / "run") == [1, 2]


def test_a_run_that_could_not_save_says_since_when_and_does_not_end_well(run_alone, tmp_path):
    """A file where the folder of checkpoints belongs, from the first score of a second run on."""
    (tmp_path / "user.py").write_text(
        "from pathlib import Path\n"
        "def reward(prompts, completions):\n"
        f"    folder = Path({str(tmp_path / 'run' / 'checkpoints')!r})\n"
        "    if (folder / 'latest').exists():\n"
        "        folder.rename(folder.with_name('moved'))\n"
        "        folder.touch()\n"
        "    return [float(index % 2) for index in range(len(completions))]\n"
    )
    options = [f"rewards.functions.0.name={tmp_path / 'user.py'}:reward", "checkpoint.every=1"]
    code, output = run_alone(*options, "run.steps=1")
    assert code == 0, output
    code, output = run_alone(*options, "run.steps=3")
    assert code == 2, output
    assert output.rstrip().splitlines()[-1].startswith("nothing was saved since step 1: ")
    assert "warning: nothing was saved since step 1: " in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "hf" / "config.json").exists()  # what was trained is not lost
    assert saved_steps(tmp_path / "run") == []


def test_a_model_folder_that_disappears_is_told_and_the_weights_are_kept(run_alone, tmp_path):
    model = tmp_path / "model"
    shutil.copytree("examples/quickstart/model", model)
    (tmp_path / "user.py").write_text(
        "import shutil\n"
        "def reward(prompts, completions):\n"
        f"    shutil.rmtree({str(model)!r}, ignore_errors=True)\n"
        "    return [float(index % 2) for index in range(len(completions))]\n"
    )
    code, output = run_alone(
        f"rewards.functions.0.name={tmp_path / 'user.py'}:reward", f"model.path={model}", "run.steps=1"
    )
    assert code == 2 and f"{model / 'config.json'} is gone" in output, output
    assert not (tmp_path / "run" / "hf").exists()
    assert load_file(tmp_path / "run" / "hf.partial" / "model.safetensors")


def test_more_steps_after_the_end_change_no_completions_of_the_old_last_step(run_alone, tmp_path):
    code, output = run_alone("run.steps=2", "checkpoint.every=5", "run.export_hf=false")
    assert code == 0, output
    path = tmp_path / "run" / "completions" / "step_000002.jsonl"
    before = path.read_bytes()
    code, output = run_alone("run.steps=3", "checkpoint.every=5", "run.export_hf=false")
    assert code == 0 and "resumed after step 2" in output
    assert path.read_bytes() == before
    assert path.with_name("step_000003.jsonl").exists()
