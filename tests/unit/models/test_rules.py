"""Parameter rules: merge and split are inverses on every tp rank, and the QKV interleave is Megatron's."""

import pytest
import torch

from megagrpo.models import families
from megagrpo.models.family import FAMILIES, checkpoint_tensors
from megagrpo.models.rules import Dimensions, ParameterRule, RuleTable, merge, split
from megagrpo.planning.contract_suites import example_config

DIMS = Dimensions(num_attention_heads=8, num_query_groups=4, head_dim=2, vocab_size=10, padded_vocab_size=16)
families.load_all()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_qkv_of_a_rank_holds_whole_groups_query_key_value(tp):
    """Group g of 4 has query heads 2g and 2g + 1: rank order is q q k v per group."""
    rule = ParameterRule("x", ("q", "k", "v"), "qkv", ((16, 3), (8, 3), (8, 3)), engine="qkv")
    head = lambda kind, index: torch.full((2, 3), 100.0 * kind + index)  # noqa: E731
    queries, keys, values = (
        torch.cat([head(kind, i) for i in range(count)]) for kind, count in ((1, 8), (2, 4), (3, 4))
    )
    for rank in range(tp):
        local = [part.chunk(tp)[rank] for part in (queries, keys, values)]
        merged = merge(rule, local, DIMS, tp)
        want = [
            h
            for g in range(4 // tp * rank, 4 // tp * (rank + 1))
            for h in (100 + 2 * g, 100 + 2 * g + 1, 200 + g, 300 + g)
        ]
        assert merged[::2, 0].tolist() == want
        for got, part in zip(split(rule, merged, DIMS, tp), local, strict=True):
            assert torch.equal(got, part)


def test_qkv_bias_is_interleaved_like_the_weight():
    rule = ParameterRule("x", ("q", "k", "v"), "qkv", ((16, 3), (8, 3), (8, 3)), engine="qkv")
    parts = [torch.arange(16.0), torch.arange(16.0, 24.0), torch.arange(24.0, 32.0)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(split(rule, merge(rule, parts, DIMS, 1), DIMS, 1), parts, strict=True)
    )


def test_gate_and_up_are_stacked_per_rank():
    rule = ParameterRule("x", ("gate", "up"), "gate_up", ((4, 3),) * 2, engine="gate_up")
    gate, up = torch.ones(4, 3), torch.zeros(4, 3)
    merged = merge(rule, [gate, up], DIMS, 1)
    assert merged[:4].eq(1).all() and merged[4:].eq(0).all()
    assert torch.equal(split(rule, merged, DIMS, 1)[1], up)


def test_rule_table_finds_the_layer_and_refuses_unknown_names():
    fc2 = ParameterRule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("a.{layer}",), "row", ((2, 2),))
    name = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
    expert = ParameterRule(name, ("b.{layer}.{expert}",), "row", ((2, 2),), num_experts=8)
    table = RuleTable([fc2, expert])
    rule, *indices = table.find("decoder.layers.12.mlp.linear_fc2.weight")
    assert (indices, rule.hf_names(*indices)) == ([12, None], ("a.12",))
    rule, *indices = table.find(name.format(layer=3, expert=7))
    assert (indices, rule.hf_names(*indices)) == ([3, 7], ("b.3.7",))
    with pytest.raises(KeyError, match="linear_fc3"):
        table.find("decoder.layers.12.mlp.linear_fc3.weight")


@pytest.mark.parametrize("name", FAMILIES.names())
def test_no_two_rules_of_a_family_share_an_hf_tensor_except_a_tied_head(name):
    hf = example_config(name, FAMILIES.get(name))
    tensors = [tensor.name for tensor in checkpoint_tensors(hf)]
    assert len(tensors) == len(set(tensors))
