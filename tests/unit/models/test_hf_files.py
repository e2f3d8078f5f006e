"""HF folders: sharded or not, broken in the usual ways, written whole or not at all."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.errors import UserError
from megagrpo.models.hf_export import write_hf_folder
from megagrpo.models.hf_files import check_tied, load_hf_weights, open_tensor, read_part
from megagrpo.models.rules import Dimensions, ParameterRule, Size
from megagrpo.models.safetensors_folder import SafetensorsFolder

DIMS = Dimensions(num_attention_heads=4, num_query_groups=2, head_dim=2, vocab_size=5, padded_vocab_size=8)
VOCAB = ParameterRule("e", ("e",), "vocab", ((Size(5, "vocab_size"), Size(2, "hidden_size")),), "embedding")


def test_vocabulary_rows_beyond_the_true_size_are_zeros(tmp_path):
    weight = torch.arange(10.0).reshape(5, 2)
    save_file({"e": weight}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    parts = [read_part(open_tensor(source, VOCAB, 0, None, None), VOCAB, DIMS, 4, rank) for rank in range(4)]
    assert torch.equal(torch.cat(parts)[:5], weight)
    assert torch.cat(parts)[5:].eq(0).all() and all(part.shape == (2, 2) for part in parts)


def test_a_vocabulary_of_another_size_is_an_error(tmp_path):
    save_file({"e": torch.zeros(6, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"e: shape \[6, 2\], .* \[5 \(vocab_size\), 2 \(hidden_size\)\]"):
        open_tensor(SafetensorsFolder(tmp_path), VOCAB, 0, None, None)


def test_a_truncated_file_is_named(tmp_path):
    save_file({"e": torch.zeros(5, 200)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model.safetensors: not readable, truncated\?"):
        SafetensorsFolder(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"e": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: no such safetensors file"):
        SafetensorsFolder(tmp_path).tensor_slice("e")


def test_a_missing_tensor_is_named(tmp_path):
    save_file({"e": torch.zeros(5, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tensor f is missing"):
        SafetensorsFolder(tmp_path).tensor_slice("f")


def test_export_is_sharded_beyond_the_limit_and_reads_back(tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.models.hf_export.MAX_SHARD_BYTES", 100)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    tensors = {name: torch.full((5, 3), float(i)) for i, name in enumerate("abc")}
    write_hf_folder(tensors.items(), tmp_path / "source", tmp_path / "target")
    source = SafetensorsFolder(tmp_path / "target")
    assert len(list((tmp_path / "target").glob("model-*-of-00003.safetensors"))) == 3
    for name, tensor in tensors.items():
        assert torch.equal(source.tensor_slice(name)[:], tensor)


def test_an_export_that_fails_leaves_the_old_folder(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    write_hf_folder([("a", torch.zeros(2))], tmp_path / "source", tmp_path / "target")

    def broken():
        yield "a", torch.ones(2)
        raise RuntimeError("the ranks went away")

    with pytest.raises(RuntimeError, match="went away"):
        write_hf_folder(broken(), tmp_path / "source", tmp_path / "target")
    assert SafetensorsFolder(tmp_path / "target").tensor_slice("a")[:].eq(0).all()


def stage(rules, **fields):
    """A stage model of one rank, as far as reading it needs one."""
    parameters = [(rule.megatron, rule, None, None, torch.zeros(8, 2)) for rule in rules]
    return SimpleNamespace(
        named_rules=lambda: parameters,
        shard=lambda rule: (1, 0),
        dims=DIMS,
        rules=SimpleNamespace(rules=rules),
        groups=SimpleNamespace(world_size=1, rank=0),
        hf=SimpleNamespace(vocab_size=5, **fields),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    weight = torch.ones(5, 2)
    weight[3, 1] = value
    save_file({"e": weight}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tensor e holds values that are not finite"):
        load_hf_weights(stage([VOCAB]), tmp_path)


def test_a_head_that_differs_contradicts_a_tied_embedding(tmp_path):
    head = ParameterRule("o", ("e",), "vocab", VOCAB.shapes, "head", is_tied_copy=True)
    model, embedding = stage([VOCAB, head]), torch.randn(5, 2)
    for stored, is_refused in ((embedding.clone(), False), (embedding + 1e-3, True)):
        save_file({"e": embedding, "lm_head.weight": stored}, tmp_path / "model.safetensors")
        if is_refused:
            with pytest.raises(UserError, match="tie_word_embeddings: true contradicts the tensors"):
                check_tied(model, SafetensorsFolder(tmp_path))
        else:
            check_tied(model, SafetensorsFolder(tmp_path))
