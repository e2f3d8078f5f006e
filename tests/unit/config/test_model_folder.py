"""What a run changes in its model's config.json: told where it can't be, and one folder that all read."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.config.model_folder import (
    describe_changes,
    hf_folder_of,
    is_megatron_checkpoint,
    write_model_folder,
)
from megagrpo.config.training_sections import ModelConfig
from megagrpo.engines.hf_model import build_model
from megagrpo.errors import UserError
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.hf_export import copy_hf_files
from megagrpo.planning.file_checks import read_hf_config as read_for_checks

TRANSFORMERS_ATTENTION = "sdpa"


@pytest.fixture
def folder(tmp_path, tiny_hf_folder):
    """A model whose config.json has a field that no family knows."""
    source = tiny_hf_folder("qwen3")
    folder = tmp_path / "source"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"house_note": "x"}))
    return folder


def changed(folder, **fields):
    return ModelConfig(path=str(folder), **fields)


def test_a_field_that_nobody_knows_can_be_ignored_and_is_told(folder, tmp_path):
    with pytest.raises(UserError, match="house_note: 'x': not a field that family"):
        read_hf_config(folder)
    model = changed(folder, ignore_fields=["house_note"])
    lines = write_model_folder(model, tmp_path / "run" / "model")
    assert lines == ["model.ignore_fields: house_note: 'x' is left out"]
    assert "house_note" not in read_hf_config(tmp_path / "run" / "model").raw


def test_trainer_engine_checks_and_exports_read_the_changed_fields(folder, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 777.0}
    model = changed(folder, ignore_fields=["house_note"], overrides={"rope_parameters": rope})
    target = tmp_path / "run" / "model"
    write_model_folder(model, target)
    assert read_hf_config(target).rope_theta == 777.0
    assert read_for_checks(model)["rope_parameters"] == rope
    copy_hf_files(target, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["rope_parameters"] == rope
    # the embedded engine's model is transformers' own, of a folder that was written by hand
    raw = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(raw))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = build_model(target, TRANSFORMERS_ATTENTION, torch.float32, load_weights=True)
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        assert torch.equal(engine(ids).logits, expected(ids).logits)


def test_weights_are_linked_and_everything_else_is_the_folders_own(folder, tmp_path):
    target = tmp_path / "run" / "model"
    write_model_folder(changed(folder, ignore_fields=["house_note"]), target)
    assert {path.name for path in target.iterdir()} == {path.name for path in folder.iterdir()}
    for path in target.iterdir():
        assert path.is_symlink() == path.name.endswith(".safetensors"), path.name
    assert os.path.samefile(target / "model.safetensors", folder / "model.safetensors")


def test_a_model_that_the_run_had_before_leaves_nothing_behind(folder, tmp_path):
    target = tmp_path / "run" / "model"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_model_folder(changed(folder, ignore_fields=["house_note"]), target)
    (folder / "chat_template.jinja").unlink()
    write_model_folder(changed(folder, overrides={"rms_norm_eps": 1e-5}), target)
    assert not (target / "chat_template.jinja").exists()
    assert json.loads((target / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_checkpoint_stays_one(folder, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "hf_files").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "manifest.json"):
        (checkpoint / name).write_text(name)
    copy_hf_files(folder, checkpoint / "hf_files")
    target = tmp_path / "run" / "model"
    write_model_folder(changed(checkpoint, overrides={"head_dim": 16}), target)
    assert is_megatron_checkpoint(target) and (target / "__0_0.distcp").read_text() == "__0_0.distcp"
    assert json.loads((hf_folder_of(target) / "config.json").read_text())["head_dim"] == 16
    assert (hf_folder_of(target) / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ignore_fields": ["house_noet"]},
            "model.ignore_fields: house_noet: config.json has no such field; did you mean house_note?",
        ),
        (
            {"ignore_fields": ["house_note"], "overrides": {"house_note": "y"}},
            "model.ignore_fields: house_note: is in model.overrides too",
        ),
    ],
)
def test_what_cannot_be_changed_is_told(folder, tmp_path, fields, message):
    with pytest.raises(UserError) as error:
        write_model_folder(changed(folder, **fields), tmp_path / "run" / "model")
    assert str(error.value) == message


def test_every_change_is_one_line_with_both_values():
    model = changed("m", ignore_fields=["a"], overrides={"b": 2, "c": None})
    assert describe_changes({"a": 1, "b": 1}, model) == [
        "model.ignore_fields: a: 1 is left out",
        "model.overrides: b: 2 in place of 1",
        "model.overrides: c: None in place of none",
    ]
