"""tools/inspect_checkpoint.py: what a folder holds, what is wrong with it, what differs of two."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.checkpoint.contents import read_contents

MODEL = Path("examples/quickstart/model")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("inspect_checkpoint", "tools/inspect_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_good_folder_is_told_with_family_tensors_and_bytes(command, folder, capsys):
    assert command([str(folder)]) == 0
    tensors = load_file(folder / "model.safetensors")
    told = capsys.readouterr().out
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert "family: qwen3" in told and f"tensors: {len(tensors)}, {total:,} bytes" in told
    assert f"F32: {len(tensors)}" in told


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight: missing"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "extra: family qwen3 does not know it"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
            "model.norm.weight: shape [3], by config.json it is [",
        ),
    ],
)
def test_a_tensor_that_config_and_weights_disagree_on_is_named(command, folder, capsys, edit, told):
    change(folder, edit)
    assert command([str(folder)]) == 1
    assert f"wrong: {told}" in capsys.readouterr().out


def test_a_truncated_file_is_named_with_the_bytes_that_it_lacks(command, folder, capsys):
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 5)
    assert command([str(folder)]) == 1
    assert f"model.safetensors: not readable: ValueError: {size - 5} bytes, by its header it has {size}" in (
        capsys.readouterr().out
    )


def test_an_index_that_names_a_missing_file_or_tensor_is_told(folder):
    tensors = load_file(folder / "model.safetensors")
    names = dict.fromkeys(tensors, "model.safetensors") | {"a": "model.safetensors", "b": "gone.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    problems = read_contents(folder).problems
    assert any(line.startswith("gone.safetensors: not readable: FileNotFoundError") for line in problems)
    assert "a: the index says model.safetensors, which lacks it" in problems


def test_a_tensor_in_two_files_is_told(folder):
    name = "model.norm.weight"
    save_file({name: torch.ones(2)}, folder / "second.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names | {name: "second.safetensors"}}))
    assert f"{name}: in second.safetensors and in another file too" in read_contents(folder).problems


def test_a_difference_of_values_is_seen_by_checksums_alone(command, folder, capsys):
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    assert command([str(folder), "--diff", str(other), "--checksums"]) == 0
    change(other, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert command([str(folder), "--diff", str(other)]) == 0
    capsys.readouterr()
    assert command([str(folder), "--diff", str(other), "--checksums"]) == 1
    assert capsys.readouterr().out.startswith("model.norm.weight: values differ (checksums ")


def test_a_difference_of_dtype_and_names_is_told(command, folder, capsys):
    other = folder.with_name("other")
    shutil.copytree(folder, other)

    def edit(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        tensors["extra"] = torch.ones(2)

    change(other, edit)
    assert command([str(folder), "--diff", str(other)]) == 1
    told = capsys.readouterr().out
    assert "model.norm.weight: F32 [" in told and "| BF16 [" in told and f"extra: only in {other}" in told


def test_a_folder_that_is_no_model_is_refused_in_one_line(command, tmp_path, capsys):
    assert command([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
