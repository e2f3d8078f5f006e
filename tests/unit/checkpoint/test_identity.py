"""A checkpoint's model, tokenizer and reference weights against those of a run: both sides are named."""

from dataclasses import replace
from pathlib import Path

import pytest

from megagrpo.checkpoint import identity
from megagrpo.checkpoint.identity import (
    check_own_config,
    check_own_files,
    compare,
    compare_weights,
    describe_model,
    describe_tokenizer,
)
from megagrpo.checkpoint.manifest import Manifest, write_file, write_manifest
from megagrpo.errors import SharedUserError, UserError
from megagrpo.models.hf_config import read_hf_config

MODEL = Path("examples/quickstart/model")


def test_a_model_is_its_config_without_what_says_nothing_about_it():
    described = describe_model(read_hf_config(MODEL))
    assert described["num_hidden_layers"] > 0 and "transformers_version" not in described
    assert compare("model config", described, described) == []


def test_a_config_that_was_changed_beside_the_weights_is_told(tmp_path):
    """A checkpoint that is used as a model: config.json as it is, and as it was when they were saved."""
    hf = read_hf_config(MODEL)
    check_own_config(MODEL, hf)  # no checkpoint of a run: nothing to compare
    saved = describe_model(hf) | {"rope_theta": 5e5}
    manifest = Manifest(
        step=1, weight_version=1, model=saved, tokenizer={}, layout={}, versions={}, files=(), reference=None
    )
    write_manifest(tmp_path, manifest)
    with pytest.raises(UserError, match=r"rope_theta: .*, the manifest of the weights says 500000\.0"):
        check_own_config(tmp_path, hf)
    write_manifest(tmp_path, replace(manifest, model=describe_model(hf)))
    check_own_config(tmp_path, hf)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        check_own_config(tmp_path, hf)


def test_shards_of_a_checkpoint_that_is_a_model_are_checked_before_they_are_read(tmp_path, monkeypatch):
    """What was edited by hand beside the shards, a chat template say, is the user's."""
    monkeypatch.setattr(identity, "all_gather_metadata", lambda value: [value])
    monkeypatch.setattr(identity, "share_out", lambda items: items)
    check_own_files(MODEL)  # no manifest
    (tmp_path / "hf_files").mkdir()
    names = ("__0_0.distcp", ".metadata", "common.pt", "hf_files/tokenizer.json", "trainer_state.json")
    files = tuple(write_file(tmp_path, name, name.encode()) for name in names)
    write_manifest(tmp_path, Manifest(1, 1, {}, {}, {}, {}, files))
    (tmp_path / "hf_files" / "tokenizer.json").write_text("mine")
    check_own_files(tmp_path)
    (tmp_path / ".metadata").write_bytes(b".metadatA")
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(SharedUserError) as caught:
        check_own_files(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"model.path: {tmp_path}: __0_0.distcp: missing"
    assert lines[1].startswith(f"model.path: {tmp_path}: .metadata: checksum") and len(lines) == 2


def test_every_field_that_differs_is_told_with_both_values():
    saved, own = {"layers": 2, "width": 8, "gone": 1}, {"layers": 3, "width": 8, "new": None}
    assert compare("model config", saved, own) == [
        "model config gone: the checkpoint has 1, this run (not set)",
        "model config layers: the checkpoint has 2, this run 3",
        "model config new: the checkpoint has (not set), this run None",
    ]


def test_a_tokenizer_is_which_text_each_id_stands_for(character_tokenizer):
    described = describe_tokenizer(character_tokenizer)
    assert described["tokens"] == len(character_tokenizer.get_vocab()) and len(described["sha256"]) == 64
    swapped = type(character_tokenizer)(tokenizer_object=character_tokenizer._tokenizer, eos_token="<eos>")
    vocabulary = character_tokenizer.get_vocab()
    first, second = list(vocabulary)[3:5]
    swapped.get_vocab = lambda: vocabulary | {first: vocabulary[second], second: vocabulary[first]}
    assert describe_tokenizer(swapped)["sha256"] != described["sha256"]
    assert describe_tokenizer(swapped)["tokens"] == described["tokens"]


def test_reference_weights_differ_by_file():
    saved = {"files": [["a", 5, "00000001"], ["b", 5, "00000002"], ["c", 5, "00000003"]]}
    own = {"files": [["a", 5, "00000001"], ["b", 6, "00000002"], ["c", 5, "00000004"], ["d", 1, "00000005"]]}
    assert compare_weights(saved, own) == [
        "b: 6 bytes, then 5",
        "c: checksum 00000004, then 00000003",
        "d: was not there",
    ]
    assert compare_weights(own, saved)[-1] == "d: missing"
    assert compare_weights(saved, saved) == []
