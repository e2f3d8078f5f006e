"""A config field that changes the maths is refused by name; harmless ones pass."""

import json

import pytest

from megagrpo.errors import UserError
from megagrpo.models.hf_config import read_hf_config

BASE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "hidden_act": "silu",
}  # fmt: skip


def read(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    return read_hf_config(tmp_path)


def test_plain_config_is_read_with_defaults(tmp_path):
    hf = read(tmp_path)
    assert (hf.head_dim, hf.num_query_groups, hf.rope_theta, hf.rope_type, hf.tie_word_embeddings) == (
        4,
        2,
        10000.0,
        "default",
        False,
    )


def test_old_and_new_rope_fields_are_read_alike(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert (old.rope_type, old.rope_theta, old.rope_parameters) == (
        new.rope_type,
        new.rope_theta,
        new.rope_parameters,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "type 'yarn' is not supported (supported: default",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ({"logit_softcapping": 30.0}, "logit_softcapping: 30.0: not a field that family 'llama' knows"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "qwen33"}, "did you mean qwen3"),
    ],
)
def test_a_field_that_changes_the_maths_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match="model_type" if "model_type" in message else None) as error:
        read(tmp_path, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        ({"model_type": "llava"}, "nearest to llama, with no field that differs"),
        ({"model_type": "qwen9", "use_qk_norm": True}, "nearest to qwen., with differences in use_qk_norm"),
        (
            {"model_type": "mixt2", "num_local_experts": 4, "router_jitter_noise": 0.0, "softcap": 3.0},
            "nearest to mixtral, with differences in softcap",
        ),
    ],
)
def test_an_unknown_family_is_told_the_nearest_one_and_what_differs(tmp_path, changes, nearest):
    with pytest.raises(UserError, match=nearest):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("gpt_oss", "a sink in each head's soft-max"),
        ("gemma3_text", "two rotary embeddings"),
        ("gemma3", "norms"),
    ],
)
def test_what_a_family_beyond_megatron_needs_is_told(tmp_path, name, needs):
    with pytest.raises(UserError, match=f"model_type: '{name}': needs .*{needs}"):
        read(tmp_path, model_type=name)


def test_code_of_the_folder_is_refused_unless_it_is_left_out_by_name(tmp_path):
    with pytest.raises(UserError, match=r"auto_map: .* never run; model.ignore_fields=\[auto_map\]"):
        read(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_x.X"})


def test_all_problems_are_told_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        read(tmp_path, mlp_bias=True, hidden_act="gelu")
    assert len(str(error.value).splitlines()) == 2
