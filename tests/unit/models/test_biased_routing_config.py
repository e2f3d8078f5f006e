"""DeepSeek-V3's and GLM-4.5's config.json: what a missing field means to transformers, YaRN as transformers
computes it, and what is refused.
"""

import json

import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megagrpo.errors import UserError
from megagrpo.models.carried_tensors import is_carried
from megagrpo.models.family import FAMILIES, checkpoint_tensors
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.rope import inverse_frequencies, rotary_scale

BASE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096,
}  # fmt: skip
V3_YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read(tmp_path, **fields):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | BASE | fields))
    return read_hf_config(tmp_path)


@pytest.mark.parametrize(("name", "config"), [("deepseek_v3", DeepseekV3Config), ("glm4_moe", Glm4MoeConfig)])
def test_a_missing_field_is_what_transformers_takes_for_it(tmp_path, name, config):
    theirs, hf = config(**BASE), read(tmp_path, model_type=name)
    for field, value in FAMILIES.get(name).defaults.items():
        if field not in BASE:
            found = getattr(theirs, field, theirs.rope_parameters.get(field))
            assert found == value == hf.raw[field], field
    assert (hf.num_experts, hf.rms_norm_eps) == (theirs.n_routed_experts, theirs.rms_norm_eps)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale_all_dim": 0.5},
        {"mscale": None, "mscale_all_dim": None, "truncate": False},
        {"attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2, "factor": 4},
    ],
)
def test_yarn_is_that_of_transformers(tmp_path, changes):
    scaling = {key: value for key, value in (V3_YARN | changes).items() if value is not None}
    hf = read(tmp_path, rope_theta=10000, rope_scaling=scaling)
    theirs = DeepseekV3Config(**BASE, rope_parameters={**scaling, "rope_type": "yarn", "rope_theta": 10000})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    torch.testing.assert_close(inverse_frequencies(hf), frequencies, rtol=1e-6, atol=0)
    assert rotary_scale(hf) == pytest.approx(factor, rel=1e-12)


def test_half_of_each_head_is_rotated_where_the_file_says_nothing(tmp_path):
    assert read(tmp_path, model_type="glm4_moe", head_dim=32).rotary_dim == 16
    assert read(tmp_path, model_type="glm4_moe", head_dim=32, partial_rotary_factor=0.25).rotary_dim == 8


@pytest.mark.parametrize("rank", [16, None])
def test_kimi_k2_is_read_as_deepseek_v3(tmp_path, rank):
    fields = {"q_lora_rank": rank, "n_group": 1, "topk_group": 1, "n_routed_experts": 8}
    names = [
        [tensor.name for tensor in checkpoint_tensors(read(tmp_path, model_type=name, **fields))]
        for name in ("kimi_k2", "deepseek_v3")
    ]
    assert names[0] == names[1]
    assert ("model.layers.0.self_attn.q_proj.weight" in names[0]) is (rank is None)


def test_layers_for_multi_token_prediction_are_carried_and_others_are_not():
    raw = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    found = [is_carried(f"model.layers.{layer}.eh_proj.weight", raw) for layer in (3, 4, 5)]
    assert found == [False, True, False]
    assert not is_carried("model.layers.4.a", {"num_hidden_layers": 4}) and not is_carried("lm_head", raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method: 'greedy': changes the forward pass"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax': changes the forward pass"),
        ({"rope_interleave": False}, "rope_interleave: False: changes the forward pass"),
        ({"n_group": 7}, "n_group: 7: must divide n_routed_experts = 256 into groups of 2 or more"),
        ({"topk_group": 9}, "topk_group: 9: must be 1 to n_group = 8"),
        ({"num_experts_per_tok": 200}, "topk_group: 4: must be 1 to n_group = 8, with num_experts_per_tok"),
        ({"n_shared_experts": None}, "n_shared_experts: None: must be 1 or more"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: 8: must be num_attention_heads = 16"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: 0: must be above 0"),
        ({"rope_scaling": {"type": "longrope"}}, "type 'longrope' is not supported (supported: default, "),
    ],
)
def test_what_deepseek_v3_does_not_compute_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        read(tmp_path, **changes)
    assert message in str(error.value)
