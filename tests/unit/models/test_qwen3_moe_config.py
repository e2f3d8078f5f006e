"""A Qwen3-MoE config.json is read in the spelling of transformers 4 and 5; layers that are not sparse are
refused.
"""

import json

import pytest

from megagrpo.errors import UserError
from megagrpo.models.family import FAMILIES
from megagrpo.models.hf_config import read_hf_config

BASE = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "hidden_act": "silu",
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip


def read(tmp_path, **changes):
    fields = {name: value for name, value in (BASE | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return read_hf_config(tmp_path)


def test_both_spellings_of_the_number_of_experts_are_read(tmp_path):
    assert read(tmp_path).num_experts == read(tmp_path, num_experts=..., num_local_experts=8).num_experts == 8


# transformers: missing is False
@pytest.mark.parametrize(("norm", "pre_softmax"), [(True, False), (False, True), (..., True)])
def test_weights_are_normalised_as_the_file_says(tmp_path, norm, pre_softmax):
    hf = read(tmp_path, norm_topk_prob=norm)
    assert FAMILIES.get("qwen3_moe").transformer_config_fields(hf)["moe_router_pre_softmax"] is pre_softmax


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers: [0]"),
        ({"num_experts": ...}, "num_experts: missing"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size: missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9: must be 1 to num_experts = 8"),
        (
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "norm_topk_prob: True: with num_experts_per_tok 1",
        ),
        ({"n_shared_experts": 1}, "n_shared_experts: 1: not a field that family 'qwen3_moe' knows"),
    ],
)
def test_what_this_family_does_not_compute_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        read(tmp_path, **changes)
    assert message in str(error.value)
