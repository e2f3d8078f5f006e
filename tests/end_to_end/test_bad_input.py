"""A user's mistake ends the run on all ranks with one clear line and a non-zero exit code, and no rank
hangs.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]
MODEL = Path("examples/quickstart/model")


@pytest.fixture
def broken_model(tmp_path):
    """A function: name of a breakage -> model folder with it."""

    def make(breakage):
        folder = shutil.copytree(MODEL, tmp_path / breakage)
        config = json.loads((folder / "config.json").read_text())
        weights = folder / "model.safetensors"
        if breakage == "truncated":
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        elif breakage == "missing":
            weights.unlink()
        elif breakage == "softcap":
            config["attn_logit_softcapping"] = 50.0
        elif breakage == "small_vocabulary":
            config["vocab_size"] = 12
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def user_code(tmp_path):
    """A file of rewards and data sets that misbehave."""
    path = tmp_path / "user.py"
    path.write_text(
        "import math\n"
        "def raises(prompts, completions): return [1 / 0]\n"
        "def nan(prompts, completions): return [math.nan] * len(completions)\n"
        "def short(prompts, completions): return [1.0]\n"
        "def no_rows(): return []\n"
        "def long_rows(): return [{'prompt': '^' + '1' * 100 + '=', 'answer': '1'}]\n"
    )
    return path


def start(*overrides, ranks=1):
    """Run the quickstart with overrides, in a process alone or under torchrun; return (exit code, output)."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += [
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "-m",
        ]
    command = [
        *launcher,
        "megagrpo.train",
        "examples/quickstart/quickstart.yaml",
        "rollout.prompts_per_step=4",
        *map(str, overrides),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    return done.returncode, done.stdout + done.stderr


def one_line(output, *parts):
    """Assert that exactly one line holds all `parts`, and that no traceback is shown."""
    lines = [line for line in output.splitlines() if all(part in line for part in parts)]
    assert len(lines) == 1, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize(
    ("breakage", "parts"),
    [
        ("truncated", ("model.safetensors", "not readable, truncated?")),
        ("missing", ("model.path", "no weights (*.safetensors) in it")),
        ("softcap", ("attn_logit_softcapping", "not a field that family 'qwen3' knows")),
        ("small_vocabulary", ("token ids up to 13", "vocab_size is 12")),
    ],
)
def test_a_broken_model_folder_is_named(broken_model, tmp_path, breakage, parts):
    code, output = start(
        f"model.path={broken_model(breakage)}", "parallel.tp=1", f"run.dir={tmp_path / 'run'}"
    )
    assert code == 2
    one_line(output, *parts)


@pytest.mark.parametrize(
    ("source", "parts"),
    [("no_rows", ("no prompts",)), ("long_rows", ("row 0", "the prompt has", "data.max_prompt_tokens is 8"))],
)
def test_data_that_cannot_train_is_named(user_code, tmp_path, source, parts):
    code, output = start(f"data.source={user_code}:{source}", "parallel.tp=1", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    one_line(output, *parts)


@pytest.mark.parametrize(
    ("reward", "parts"), [("raises", ("ZeroDivisionError",)), ("nan", ("nan",)), ("short", ("1 value",))]
)
def test_a_reward_that_misbehaves_stops_all_ranks(user_code, tmp_path, reward, parts):
    """Under torchrun: the first rank to notice ends the others; nobody waits in a collective."""
    code, output = start(
        f"rewards.functions.0.name={user_code}:{reward}", f"run.dir={tmp_path / 'run'}", ranks=2
    )
    assert code != 0
    mine = [line for line in output.splitlines() if f"user.py:{reward}" in line]
    assert mine and all(part in mine[0] for part in parts), output


def test_mistakes_of_several_sections_are_told_at_once(tmp_path):
    code, output = start(
        "rollout.temprature=1", "parallel.tp=3", "optimizer.lr=-1", f"run.dir={tmp_path / 'run'}"
    )
    assert code == 2
    one_line(output, "rollout.temprature: not a field; did you mean temperature?")
    one_line(output, "optimizer.lr", "-1")


def test_a_layout_that_does_not_divide_shows_the_arithmetic(tmp_path):
    code, output = start("parallel.tp=1", "parallel.pp=3", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    one_line(output, "1 ranks are not a multiple of pp 3 = 3")


def test_an_unsupported_precision_says_what_is_missing(tmp_path):
    code, output = start("precision.recipe=fp8_delayed", "parallel.tp=1", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    one_line(output, "precision.recipe", "fp8_delayed", "CUDA")


def test_torchrun_ends_with_the_mistake(tmp_path):
    """The launcher's own traceback comes before it, and nothing but a rule after it."""
    code, output = start("parallel.tp=2", "parallel.pp=2", f"run.dir={tmp_path / 'run'}", ranks=2)
    assert code != 0
    last = [line for line in output.splitlines() if line.strip("= ")][-1]
    assert "2 ranks are not a multiple of" in last, output


def test_a_run_folder_that_cannot_be_made_is_one_line_before_the_launch():
    command = [sys.executable, "-m", "megagrpo.cli", "run", "examples/quickstart/quickstart.yaml"]
    done = subprocess.run(
        [*command, "run.dir=/proc/foo"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith("run.dir: /proc/foo: can't be written to: ")
