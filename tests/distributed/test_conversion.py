"""tools/: an HF folder becomes a Megatron checkpoint and comes back bit-equal; the checkpoint is a
model.path too.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))

from planted_pickles import KINDS

from megagrpo.checkpoint.contents import read_contents
from megagrpo.checkpoint.manifest import Manifest, record_file, write_manifest

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "quickstart_qwen3": None,
    "llama": LlamaConfig(vocab_size=37, **SHAPE),
    "qwen2": Qwen2Config(vocab_size=37, **SHAPE),
    "deepseek_v3": DeepseekV3Config(
        **(SHAPE | {"num_key_value_heads": 4}), vocab_size=37, q_lora_rank=12, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1, n_routed_experts=4,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=8, num_nextn_predict_layers=1,
    ),
}  # fmt: skip


def write_source(folder, config):
    """A random model; of one with layers for multi-token prediction in bfloat16, these added as DeepSeek has
    them and the router's bias in float32.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    added = getattr(config, "num_nextn_predict_layers", 0)
    (model.bfloat16() if added else model).save_pretrained(folder)
    if added:
        file = folder / "model.safetensors"
        tensors, layer = load_file(file), f"model.layers.{config.num_hidden_layers}."
        tensors |= {
            f"{layer}{name}": torch.randn(32, 64).bfloat16() for name in ("eh_proj.weight", "a.weight")
        }
        biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
        tensors |= {name: torch.randn(4) for name in biases}
        save_file(tensors, file, {"format": "pt"})


def tool(name, *arguments):
    return subprocess.run(
        [sys.executable, f"tools/{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.distributed
def test_a_megatron_checkpoint_is_inspected_by_its_manifest(tmp_path):
    folder = tmp_path / "checkpoint"
    assert tool("convert_hf_to_megatron", "examples/quickstart/model", folder).returncode == 0
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    files = [record_file(folder, name) for name in names]
    write_manifest(folder, Manifest(7, 9, {}, {}, {"tp": 2, "pp": 1}, {"torch": "x"}, files))
    done = tool("inspect_checkpoint", folder, "--checksums")
    assert done.returncode == 0, done.stdout
    for told in ("step: 7", "weight version: 9", "layout: tp 2, pp 1", "family: qwen3", "0 of"):
        assert told in done.stdout
    assert "embedding.word_embeddings.weight" in read_contents(folder).tensors
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(bytes([file.read(1)[0] ^ 1]))
    done = tool("inspect_checkpoint", folder, "--checksums")
    assert done.returncode == 1 and f"wrong: {shard.name}: checksum " in done.stdout


@pytest.mark.distributed
def test_the_command_converts_too(tmp_path):
    command = [
        sys.executable,
        "-m",
        "megagrpo.cli",
        "convert",
        "hf-to-megatron",
        "examples/quickstart/model",
        str(tmp_path / "checkpoint"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint" / ".metadata").is_file() and (
        tmp_path / "checkpoint" / "hf_files" / "tokenizer.json"
    ).is_file()


def checked_dtype(folder):
    """The dtype of all tensors, which the config names too."""
    (dtype,) = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    return dtype


@pytest.mark.distributed
def test_weights_have_the_dtype_that_is_asked_for_and_the_config_names_it(tmp_path):
    """float16, which a checkpoint does not keep, is float32 in it and after it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"])
    model.to(torch.float16).save_pretrained(tmp_path / "source")
    exact = {
        name: tensor.float() for name, tensor in load_file(tmp_path / "source/model.safetensors").items()
    }
    for arguments in (
        ("hf_to_megatron", tmp_path / "source", tmp_path / "megatron"),
        ("megatron_to_hf", tmp_path / "megatron", tmp_path / "float32"),
        ("megatron_to_hf", tmp_path / "megatron", tmp_path / "bfloat16", "--dtype", "bfloat16"),
        ("hf_to_megatron", tmp_path / "source", tmp_path / "halved", "--dtype", "bfloat16"),
        ("megatron_to_hf", tmp_path / "halved", tmp_path / "back"),
    ):
        done = tool(f"convert_{arguments[0]}", *arguments[1:])
        assert done.returncode == 0, done.stderr
    for name, dtype in (
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("back", torch.bfloat16),
    ):
        assert checked_dtype(tmp_path / name) == dtype
        written = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(written[key], exact[key].to(dtype)) for key in exact), name


@pytest.mark.distributed
def test_a_conversion_changes_fields_of_the_config_as_a_run_does(tmp_path):
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(source)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"house_note": "x"}))
    places = (source, tmp_path / "megatron")
    refused = tool("convert_hf_to_megatron", *places)
    assert refused.returncode == 2 and "model.ignore_fields=[house_note] leaves it out" in refused.stderr
    done = tool(
        "convert_hf_to_megatron",
        *places,
        "model.ignore_fields=[house_note]",
        "model.overrides.rms_norm_eps=0.01",
    )
    assert done.returncode == 0, done.stderr
    assert "model.overrides: rms_norm_eps: 0.01 in place of 1e-06" in done.stdout
    written = json.loads((tmp_path / "megatron" / "hf_files" / "config.json").read_text())
    assert "house_note" not in written and written["rms_norm_eps"] == 0.01
    assert {path.name for path in tmp_path.iterdir()} == {"source", "megatron"}


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_and_back_is_bit_equal(tmp_path, family):
    source = Path("examples/quickstart/model")
    if FAMILIES[family] is not None:
        source = tmp_path / "source"
        write_source(source, FAMILIES[family])
    for name, arguments in (
        ("convert_hf_to_megatron", (source, tmp_path / "megatron")),
        ("convert_megatron_to_hf", (tmp_path / "megatron", tmp_path / "back")),
    ):
        done = tool(name, *arguments)
        assert done.returncode == 0, done.stderr
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        kept = (
            tensor.float() if tensor.dtype == torch.float16 else tensor
        )  # a checkpoint does not keep float16
        assert after[name].dtype == kept.dtype and torch.equal(after[name], kept), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.distributed
def test_a_target_that_exists_is_refused_in_one_line(tmp_path):
    done = tool("convert_megatron_to_hf", "examples/quickstart/model", tmp_path)
    assert done.returncode == 2 and done.stderr.strip().endswith(
        "not a Megatron checkpoint (no .metadata and hf_files/ in it)"
    )


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [".metadata", "common.pt", "a shard"])
def test_what_is_planted_in_a_checkpoint_does_not_run(tmp_path, kind):
    """Each file that is a pickle. `tests/faults` plants them in a run's own checkpoints."""
    checkpoint, trace = tmp_path / "checkpoint", tmp_path / "ran"
    assert tool("convert_hf_to_megatron", "examples/quickstart/model", checkpoint).returncode == 0
    KINDS[kind](checkpoint, trace)
    done = tool("convert_megatron_to_hf", checkpoint, tmp_path / "hf")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert str(checkpoint) in done.stderr and "mkdir" in done.stderr
    assert not trace.exists() and not (tmp_path / "hf").exists()
