"""Mistral's and Mixtral's config.json: what a missing field means to transformers, and what is refused."""

import json

import pytest
from transformers import MistralConfig, MixtralConfig

from megagrpo.errors import UserError
from megagrpo.models.family import FAMILIES
from megagrpo.models.hf_config import read_hf_config

BASE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 128,
}  # fmt: skip


def read(tmp_path, **fields):
    (tmp_path / "config.json").write_text(json.dumps(BASE | fields))
    hf = read_hf_config(tmp_path)
    return hf, FAMILIES.get(hf.model_type).transformer_config_fields(hf)


@pytest.mark.parametrize(("name", "config"), [("mistral", MistralConfig), ("mixtral", MixtralConfig)])
def test_a_missing_field_is_what_transformers_takes_for_it(tmp_path, name, config):
    theirs, (hf, fields) = config(**BASE), read(tmp_path, model_type=name)
    window = theirs.sliding_window
    assert fields.get("window_size") == (None if window is None else (window - 1, 0))
    assert (hf.num_query_groups, hf.rms_norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert hf.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (hf.num_experts, fields.get("moe_router_topk")) == (
        getattr(theirs, "num_local_experts", None),
        getattr(theirs, "num_experts_per_tok", None),
    )


def test_a_window_of_null_is_none(tmp_path):
    assert "window_size" not in read(tmp_path, model_type="mistral", sliding_window=None)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window: 0: must be null or a whole number above 0"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1: changes the forward pass"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9: must be 1 to num_local_experts = 8"),
        ({"num_experts_per_tok": 1}, "every weight is 1 and the router has no gradient"),
    ],
)
def test_what_mixtral_does_not_compute_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        read(tmp_path, model_type="mixtral", **changes)
    assert message in str(error.value)
