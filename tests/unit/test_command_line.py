"""The `megagrpo` command: mistakes cost no launch, and what is launched meets on the loopback with its
threads set.
"""

import json
import subprocess
import sys

import pytest

from megagrpo import cli
from megagrpo.errors import UserError
from megagrpo.planning.doctor import available_memory_bytes, format_doctor
from megagrpo.supervision import exit_codes
from megagrpo.telemetry.report import write_report


@pytest.fixture
def run_file(tmp_path, monkeypatch, character_tokenizer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 4})
    )
    (tmp_path / "model" / "model.safetensors").touch()
    character_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 32)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: model}\ndata: {source: train.jsonl}\nrewards: {functions: [{name: exact_match}]}\n"
    )
    return path


def call(monkeypatch, *arguments, leaves_with=exit_codes.DONE):
    """Run the command line in this process; return its exit code and what it would have launched."""
    launched = []
    monkeypatch.setattr(sys, "argv", ["megagrpo", *map(str, arguments)])
    monkeypatch.setattr(
        cli.Launch, "run", lambda _, *launch, **options: launched.append(launch) or leaves_with
    )
    monkeypatch.setattr(
        "megagrpo.device.environment.set_thread_environment", lambda ranks: launched.append(ranks)
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, launched


def test_a_mistake_is_told_without_launching(run_file, monkeypatch, capsys):
    code, launched = call(monkeypatch, "run", run_file, "rollout.temprature=1", "--nproc", "2")
    assert (code, launched) == (2, [])
    assert capsys.readouterr() == ("", "rollout.temprature: not a field; did you mean temperature?\n")


def test_run_starts_one_replica_with_threads_set(run_file, monkeypatch):
    code, launched = call(monkeypatch, "run", run_file, "parallel.tp=2", "rollout.top_k=-0")
    assert (code, launched) == (0, [2, ([str(run_file), "parallel.tp=2", "rollout.top_k=-0"], 2, 0)])


def test_restarts_are_asked_for_and_a_failed_run_passes_its_code_on(run_file, monkeypatch):
    code, launched = call(monkeypatch, "run", run_file, "--max-restarts", "3", leaves_with=exit_codes.FAILED)
    assert (code, launched) == (exit_codes.FAILED, [1, ([str(run_file)], 1, 3)])


def test_dry_run_prints_and_launches_nothing(run_file, monkeypatch, capsys):
    code, launched = call(monkeypatch, "run", run_file, "--nproc", "4", "--dry-run")
    assert (code, launched) == (0, [4])  # threads set for 4 ranks, no command
    assert "Ranks: 4 = dp 4" in capsys.readouterr().out


def test_doctor_imports_nothing_heavy_and_names_what_is_there():
    code = (
        "import sys; from megagrpo import cli; sys.argv = ['megagrpo', 'doctor']\ntry:\n    "
        "cli.main()\nexcept SystemExit: pass\n"
    )
    code += (
        "print('heavy:', sorted({'torch', 'megatron', 'transformers', 'vllm', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"
    for label in (
        "package torch ",
        "cores ",
        "free memory ",
        "torch build ",
        "engine transformers ",
        "engine vllm ",
        "Transformer Engine ",
    ):
        assert any(line.startswith(label) for line in done.stdout.splitlines()), label


def test_free_memory_is_what_linux_calls_available(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert available_memory_bytes(tmp_path / "meminfo") == 64 * 1024
    assert available_memory_bytes(tmp_path / "none") is None


def test_doctor_recognises_the_package_that_is_not_nvidia_apex(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert "not NVIDIA Apex" in format_doctor()
    (tmp_path / "apex" / "optimizers").mkdir()
    assert "not NVIDIA Apex" not in format_doctor()


def test_a_folder_without_metrics_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        write_report([tmp_path])
