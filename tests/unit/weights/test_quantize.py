"""Which tensors of a model travel as float8, under which names, and which ranks send them and their
scales.
"""

import pytest
from labelled_models import MODELS, parameter_rules

from megagrpo.models.family import checkpoint_tensors
from megagrpo.models.quantization import quantization_config, quantized_shapes
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.weights.plan.boxes import numel
from megagrpo.weights.plan.publish_plan import PublishPlan
from megagrpo.weights.plan.sources import build_sources
from megagrpo.weights.plan.targets import EngineGrid
from megagrpo.weights.read.block_fp8 import quantize_sources


@pytest.mark.parametrize("family", MODELS)
def test_the_weights_of_linear_layers_and_experts_are_quantised_and_nothing_else(family):
    """What is linear is known from the rules: it is split between ranks, has two dimensions and is no
    vocabulary.
    """
    hf = MODELS[family]
    sources = build_sources(parameter_rules(hf), hf, ParallelLayout(1), hf.vocab_size)
    quantized = {source.name for source in quantize_sources(sources) if source.dtype == "float8_e4m3fn"}
    linear = {
        s.name
        for s in sources
        if s.kind in ("qkv", "gate_up", "column", "row") and len(s.shape) - s.is_expert == 2
    }
    assert quantized == linear and quantized


@pytest.mark.parametrize("family", MODELS)
def test_the_targets_are_the_tensors_of_a_quantised_checkpoint(family):
    hf = MODELS[family]
    layout = ParallelLayout(1)
    sources = build_sources(parameter_rules(hf), hf, layout, hf.vocab_size)
    plain = PublishPlan(sources, layout, EngineGrid(1, 1), hf.head_dim, 2, 10_000)
    plan = PublishPlan(list(quantize_sources(sources)), layout, EngineGrid(1, 1), hf.head_dim, 2, 10_000)
    found = {target.name: (target.shape, target.dtype) for target in plan.targets[0]}
    shapes = quantized_shapes(checkpoint_tensors(hf))
    assert {target.name for target in plain.targets[0]} < shapes.keys()
    assert {name: shape for name, (shape, _) in found.items()} == shapes
    for name, (shape, dtype) in found.items():
        if name.endswith("_scale_inv"):
            assert dtype == "float32" and found[name.removesuffix("_scale_inv")][1] == "float8_e4m3fn"
            assert shape == tuple(-(-size // 128) for size in found[name.removesuffix("_scale_inv")][0])
    elements = sum(target.numel for target in plan.targets[0] if target.dtype == "float8_e4m3fn")
    others = sum(target.numel for target in plain.targets[0] if target.dtype is None) - elements
    scales = sum(target.numel for target in plan.targets[0] if target.dtype == "float32")
    assert sum(plan.target_bytes(target) for target in plan.targets[0]) == elements + 2 * others + 4 * scales


@pytest.mark.parametrize(
    ("family", "world", "sizes"),
    [
        ("llama", 4, {"tp": 2, "pp": 2}),
        ("qwen3_moe", 8, {"tp": 2, "ep": 2}),
        ("qwen3_moe", 8, {"tp": 4, "ep": 2, "etp": 4}),
    ],
)
def test_every_byte_is_sent_once_by_a_rank_that_holds_it(family, world, sizes):
    hf, layout = MODELS[family], ParallelLayout(world, **sizes)
    sources = build_sources(parameter_rules(hf), hf, layout, hf.vocab_size + (-hf.vocab_size) % layout.tp)
    plan = PublishPlan(list(quantize_sources(sources)), layout, EngineGrid(3, 2), hf.head_dim, 2, 10_000)
    sent = {}
    for bucket in plan.buckets:
        for rank in range(world):
            for transfer in plan.sends(bucket, rank):
                key = transfer.replica, transfer.target
                sent[key] = sent.get(key, 0) + numel(transfer.box)
    assert sent == {
        (replica, number): target.numel
        for replica in range(3)
        for number, target in enumerate(plan.targets[0])
    }


def test_the_servers_configuration_leaves_routers_and_the_output_layer_out():
    config = quantization_config(checkpoint_tensors(MODELS["qwen3_moe"]))
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
    assert config["modules_to_not_convert"] == [*routers, "lm_head"]
    assert config["weight_block_size"] == [128, 128] and config["quant_method"] == "fp8"
