"""A checkpoint's model, tokenizer and reference weights against those of a run: both sides are named."""

from pathlib import Path

from megagrpo.checkpoint.identity import compare, compare_weights, describe_model, describe_tokenizer
from megagrpo.models.hf_config import read_hf_config

MODEL = Path("examples/quickstart/model")


def test_a_model_is_its_config_without_what_says_nothing_about_it():
    described = describe_model(read_hf_config(MODEL))
    assert described["num_hidden_layers"] > 0 and "transformers_version" not in described
    assert compare("model config", described, described) == []


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
