"""Model folders whose files contradict each other are told by the field; what is harmless passes."""

import json
import os
import shutil
import stat

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megagrpo.errors import UserError
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.hf_export import copy_hf_files, export_dtype, write_hf_folder
from megagrpo.models.safetensors_folder import SafetensorsFolder

BASE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 32, "max_position_embeddings": 128, "hidden_act": "silu",
}  # fmt: skip


def folder_of(tmp_path, model_type="llama", **changes):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": model_type} | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "yarn"},
            },
            "rope_scaling: {'type': 'yarn'} contradicts rope_parameters",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4},
            "rope_theta: 10000.0 contradicts rope_parameters.rope_theta: 500000.0",
        ),
        ({"rope_theta": None}, "rope_theta: null: must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "type 'linear' contradicts rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rotary embedding"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "dtype: bfloat16 contradicts torch_dtype: float32"),
        ({"num_key_value_heads": 5}, "num_attention_heads: 32: not a multiple of num_key_value_heads 5"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"vocab_size": "64"}, "vocab_size: '64': must be a whole number above 0"),
    ],
)
def test_fields_that_contradict_each_other_are_named(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        read_hf_config(folder_of(tmp_path, **changes))
    assert message in str(error.value)


def test_what_says_the_same_twice_or_nothing_passes(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    hf = read_hf_config(
        folder_of(
            tmp_path,
            rope_parameters=rope,
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_theta=1e4,
            dtype="bfloat16",
            torch_dtype="torch.bfloat16",
            some_new_field=None,
            _attn_implementation_autoset=True,
            _a_note="x",
        )
    )
    assert (hf.rope_type, hf.rope_theta) == ("linear", 1e4)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_missing_sizes_are_those_that_transformers_takes(tmp_path, model_type):
    """The embedded engine and the servers build transformers' idea of the model."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = folder_of(tmp_path, model_type, **(experts if model_type == "qwen3_moe" else {}))
    hf, theirs = read_hf_config(folder), transformers.AutoConfig.from_pretrained(folder)
    assert hf.num_query_groups == theirs.num_key_value_heads
    assert hf.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert (hf.rms_norm_eps, hf.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)


@pytest.mark.parametrize("content", ["[1]", "{", "\ud800".encode("utf-8", "surrogatepass"), "[" * 200_000])
def test_a_config_that_is_no_json_object_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"config\.json: not"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "..", "sub/model.safetensors"])
def test_an_index_that_names_a_path_outside_the_folder_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="is not a file of this folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_a_broken_index_is_one_line(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="not an index"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("choice", "named", "expected"),
    [
        ("source", {"dtype": "bfloat16"}, torch.bfloat16),
        ("source", {"torch_dtype": "float16"}, torch.float16),
        ("source", {}, torch.float32),
        ("float32", {"dtype": "bfloat16"}, torch.float32),
        ("bfloat16", {"torch_dtype": "float32"}, torch.bfloat16),
    ],
)
def test_an_exports_tensors_and_its_config_name_one_dtype(tmp_path, choice, named, expected):
    source = tmp_path / "source"
    source.mkdir()
    folder_of(source, **named)
    dtype = export_dtype(choice, source)
    write_hf_folder([("a", torch.ones(3))], source, tmp_path / "target", dtype)
    raw = json.loads((tmp_path / "target" / "config.json").read_text())
    said = {raw[key] for key in ("dtype", "torch_dtype") if key in raw}
    assert load_file(tmp_path / "target" / "model.safetensors")["a"].dtype == expected
    assert said == {str(expected).removeprefix("torch.")}


def test_a_dtype_that_no_weights_have_is_named(tmp_path):
    with pytest.raises(UserError, match="dtype: 'int8': not a dtype of weights"):
        export_dtype("source", folder_of(tmp_path, dtype="int8"))


def test_exports_have_the_modes_that_the_umask_gives(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    folder_of(source)
    (source / "config.json").chmod(0o600)
    before = os.umask(0o027)
    try:
        write_hf_folder([("a", torch.ones(3))], source, tmp_path / "target")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "target").iterdir()}
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640}


def test_the_tokenizer_is_the_runs_and_folders_are_left_where_they_are(tmp_path):
    for name, text in (("model", "the model's"), ("other", "the run's")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
        (tmp_path / name / "tokenizer_backup").mkdir()
    folder_of(tmp_path / "model")
    copy_hf_files(tmp_path / "model", tmp_path / "target", tokenizer=tmp_path / "other")
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "the run's"
    assert {path.name for path in (tmp_path / "target").iterdir()} == {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("gone", ["model", "tokenizer"])
def test_files_of_a_folder_that_is_gone_are_not_left_out_in_silence(tmp_path, gone):
    for name in ("model", "tokenizer"):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name)
    shutil.rmtree(tmp_path / gone)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / gone)):
        copy_hf_files(tmp_path / "model", tmp_path / "target", tokenizer=tmp_path / "tokenizer")
    assert not (tmp_path / "target").exists()


def test_our_files_are_read_by_the_library_as_its_own(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    folder_of(source)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    from megagrpo.models.safetensors_file import safetensors_parts

    (tmp_path / "ours.safetensors").write_bytes(b"".join(map(bytes, safetensors_parts(tensors))))
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_source_that_is_gone_is_told_by_name_and_its_weights_are_kept(tmp_path):
    with pytest.raises(FileNotFoundError) as told:
        write_hf_folder([("a", torch.ones(3))], tmp_path / "gone", tmp_path / "target")
    assert told.value.filename == str(tmp_path / "gone" / "config.json")
    assert (tmp_path / "target.partial" / "model.safetensors").is_file()
