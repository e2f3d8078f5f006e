"""`megagrpo init` writes a configuration that passes every check of a run, for the CPU and for GPUs."""

import importlib.util
import json

import pytest

from megagrpo.config.hardware import Hardware
from megagrpo.config.load import load_config
from megagrpo.errors import UserError
from megagrpo.planning.checks import check_config
from megagrpo.planning.data_checks import verify_data
from megagrpo.planning.file_checks import read_hf_config
from megagrpo.planning.starter import count_parameters, tensor_parallel, write_starter
from megagrpo.types import Completion, Prompt

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return "model"


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (1, 1), (8, 8)])
def test_what_it_writes_passes_the_checks_of_a_run(model, tmp_path, gpus, ranks):
    file, _ = write_starter(tmp_path / "add.yaml", model, None, None, gpus, 80.0)
    config = load_config(file, [])
    hardware = Hardware(nvidia_device=True, torch_cuda="12.9", transformer_engine=True)
    assert check_config(config, ranks, read_hf_config(config.model), hardware) == []
    verify_data(config)
    assert config.precision.recipe == ("bf16" if gpus else "fp32")
    assert all(
        " #" in line or ":" in line or line.startswith("#") for line in file.read_text().split("\n") if line
    )


def test_its_task_rewards_the_sum_and_nothing_else(model, tmp_path):
    spec = importlib.util.spec_from_file_location(
        "starter_task", write_starter(tmp_path / "a.yaml", model, None, None, 0, 80.0)[1]
    )
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    held_out = {row["prompt"] for row in task.eval_rows()}
    rows = task.train_rows()
    assert len(rows) > 600 and not held_out & {row["prompt"] for row in rows}
    prompt = Prompt(0, rows[0]["prompt"], (1,), {"answer": rows[0]["answer"]})
    texts = [f" {rows[0]['answer']}\n", f" {rows[0]['answer']}0", ""]
    completions = [Completion(0, n, (), "stop", text) for n, text in enumerate(texts)]
    assert task.reward([prompt] * 3, completions) == [1.0, 0.0, 0.0]


def test_own_data_and_reward_are_taken(model, tmp_path):
    (file,) = write_starter(tmp_path / "own.yaml", model, "train.jsonl", "math", 0, 80.0)
    config = load_config(file, [])
    assert (config.data.source, config.rewards.functions[0].name) == ("train.jsonl", "math")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("there.yaml", "model", None, None), "there.yaml: is there already"),
        (("new.yaml", "model", "rows.jsonl", None), "--reward: missing; with --data name the reward too"),
        (("new.yaml", "Qwen/Qwen3-8B", None, None), "`hf download Qwen/Qwen3-8B"),
    ],
)
def test_what_is_in_the_way_or_missing_is_one_line(model, tmp_path, arguments, line):
    (tmp_path / "there.yaml").touch()
    name, *rest = arguments
    with pytest.raises(UserError) as told:
        write_starter(tmp_path / name, *rest, 0, 80.0)
    assert line in str(told.value) and "\n" not in str(told.value)
    assert not (tmp_path / "new.yaml").exists() and not (tmp_path / "task.py").exists()


def test_parameters_are_counted_as_the_models_card_says():
    # Qwen3-8B: "Number of Parameters: 8.2B"
    assert count_parameters(QWEN3_8B) == pytest.approx(8.2e9, rel=0.01)


@pytest.mark.parametrize(("gpus", "memory", "tp"), [(8, 80e9, 2), (8, 192e9, 1), (64, 24e9, 8), (2, 80e9, 2)])
def test_tensor_parallelism_is_the_smallest_that_fits(gpus, memory, tp):
    # 8.2e9 * (6 / tp + 12 / gpus) bytes against half of a GPU
    assert tensor_parallel(QWEN3_8B, 8.2e9, gpus, memory) == tp
