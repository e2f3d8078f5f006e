"""Experts are read from both forms that transformers writes: one tensor each (as on the hub), and fused."""

import pytest
import torch

from megagrpo.errors import UserError
from megagrpo.models import families
from megagrpo.models.family import FAMILIES, read_hf_config
from megagrpo.models.hf_files import SafetensorsFolder, read_part
from megagrpo.models.rules import Dimensions, ParameterRule

DIMS = Dimensions(num_attention_heads=4, num_query_groups=2, head_dim=16, vocab_size=49, padded_vocab_size=64)
families.load_all()


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """The same model in the hub's form and fused."""
    root, model = tmp_path_factory.mktemp("experts"), tiny_model("qwen3_moe")
    model.save_pretrained(root / "hub")
    model.save_pretrained(root / "fused", save_original_format=False)
    return root / "hub", root / "fused"


def test_fused_experts_have_the_names_of_single_ones(folders):
    hub, fused = (SafetensorsFolder(folder) for folder in folders)
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused._file_of
    assert fused.names(num_experts=4) == hub.names(num_experts=4)


def test_every_rule_reads_the_same_slices_from_both(folders):
    hub, fused = (SafetensorsFolder(folder) for folder in folders)
    hf = read_hf_config(folders[0])
    rules = [rule for rule in FAMILIES.get("qwen3_moe").parameter_rules(hf) if rule.is_expert]
    assert len(rules) == 8  # 2 parameters of each of 4 experts
    for rule in rules:
        for name in rule.hf_names(1):
            for rank in range(2):
                assert torch.equal(
                    read_part(hub, name, rule, DIMS, 2, rank), read_part(fused, name, rule, DIMS, 2, rank)
                ), name


def test_a_missing_expert_is_named(folders):
    with pytest.raises(UserError, match=r"model\.layers\.9\.mlp\.experts\.0\.up_proj\.weight is missing"):
        read_part(
            SafetensorsFolder(folders[1]),
            "model.layers.9.mlp.experts.0.up_proj.weight",
            ParameterRule("x", ("y",), "row"),
            DIMS,
            1,
            0,
        )
