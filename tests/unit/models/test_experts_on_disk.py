"""Experts are read from both forms that transformers writes: one tensor each (as on the hub), and fused."""

from dataclasses import replace

import pytest
import torch

from megagrpo.errors import UserError
from megagrpo.models import families
from megagrpo.models.family import FAMILIES
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.hf_files import open_tensor, read_part
from megagrpo.models.rules import Dimensions
from megagrpo.models.safetensors_folder import SafetensorsFolder
from megagrpo.models.stacked_experts import stacked_rules

DIMS = Dimensions(num_attention_heads=4, num_query_groups=2, head_dim=16, vocab_size=49, padded_vocab_size=64)
families.load_all()


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """The same model in the hub's form and fused."""
    root, model = tmp_path_factory.mktemp("experts"), tiny_model("qwen3_moe")
    model.save_pretrained(root / "hub")
    model.save_pretrained(root / "fused", save_original_format=False)
    return root / "hub", root / "fused"


def experts_rules(folder):
    rules = FAMILIES.get("qwen3_moe").parameter_rules(read_hf_config(folder))
    return [rule for rule in rules if rule.is_expert]


def test_every_rule_reads_the_same_slices_from_both(folders):
    hub, stacked = (SafetensorsFolder(folder) for folder in folders)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked.names()
    assert "model.layers.0.mlp.experts.gate_up_proj" not in hub.names()
    for rule in experts_rules(folders[0]):
        for expert in range(4):
            for place in range(len(rule.hf)):
                for rank in range(2):
                    one, other = (
                        read_part(open_tensor(source, rule, place, 1, expert), rule, DIMS, 2, rank)
                        for source in (hub, stacked)
                    )
                    assert torch.equal(one, other), (rule.hf[place], expert)


def test_the_stacked_tensors_are_known_by_name(folders):
    names = SafetensorsFolder(folders[1]).names()
    hf = read_hf_config(folders[1])
    assert stacked_rules(hf).keys() == {name for name in names if ".experts." in name}


def test_a_missing_expert_is_named(folders):
    rule = experts_rules(folders[1])[0]
    with pytest.raises(UserError, match=r"model\.layers\.9\.mlp\.experts\.0\.up_proj\.weight is missing"):
        open_tensor(SafetensorsFolder(folders[1]), rule, 1, 9, 0)


def test_experts_of_another_number_are_told(folders):
    rule = replace(experts_rules(folders[1])[0], num_experts=8)
    with pytest.raises(UserError, match=r"holds 4 experts, config\.json says num_experts 8"):
        open_tensor(SafetensorsFolder(folders[1]), rule, 1, 0, 0)
