"""What `engine:` may say, alone and beside the rest of the run."""

import pytest

from megagrpo.config.load import load_config
from megagrpo.planning.engine_checks import check_engine

MODEL = {
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024, "hidden_size": 384,
    "intermediate_size": 1024,
}  # fmt: skip
FP8 = ["engine.name=vllm", "engine.server.quantization=fp8_block", "precision.recipe=bf16"]


@pytest.fixture
def problems_of(run_file):
    def check(world_size, *overrides):
        config = load_config(run_file, list(overrides))
        sections = config.engine, config.weights, config.rollout, config.precision, config.data
        return list(check_engine(*sections, config.run.collective_timeout_seconds, world_size, MODEL))

    return check


@pytest.mark.parametrize(
    ("world_size", "overrides", "expected"),
    [
        (
            1,
            ["engine.sleep_while_training=true", "rollout.off_policy=one_step_off"],
            "engine.sleep_while_training: true: rollout.off_policy one_step_off generates during updates",
        ),
        (
            1,
            ["engine.name=vllm", "engine.sleep_while_training=true", "weights.delta=true"],
            "weights.delta: true: engine.sleep_while_training drops the weights that changes would be to; "
            "take engine.server.sleep_keeps_weights: true",
        ),
        (
            1,
            ["weights.layout=sharded"],
            "weights.layout: sharded: engine.name transformers lives in the ranks, weights are copied into "
            "it directly",
        ),
        (
            1,
            ["engine.name=sglang", "engine.server.offline=true", "engine.server.addresses=['http://a:1']"],
            "engine.server.offline: true: engine.server.addresses names servers that run already",
        ),
        (
            2,
            ["engine.name=vllm", "engine.server.replicas=3"],
            "engine.server.replicas: 3 replicas: at most one for each of the 2 ranks",
        ),
        (
            1,
            ["engine.name=vllm", "engine.server.addresses=[node1:8000]"],
            "engine.server.addresses.0: node1:8000: is not of the form http://HOST:PORT",
        ),
        (
            1,
            ["engine.name=vllm", "engine.server.addresses=['http://a:x']"],
            "engine.server.addresses.0: http://a:x: is not of the form http://HOST:PORT",
        ),
        (
            2,
            [
                "engine.name=vllm",
                "engine.server.replicas=3",
                "engine.server.addresses=['http://a:1','http://b:1']",
            ],
            "engine.server.replicas: 3: engine.server.addresses names 2; leave one of them out",
        ),
        (
            1,
            ["engine.name=vllm", "engine.server.tensor_parallel=4"],
            "engine.server.tensor_parallel: 4: does not divide the model's 6 attention heads and 2 key/value "
            "heads; these do: 1, 2, 6",
        ),
        (
            1,
            ["engine.name=vllm", "engine.server.max_model_len=700"],
            "engine.server.max_model_len: 700: data.max_prompt_tokens 512 + rollout.max_new_tokens 256 = 768",
        ),
        (
            1,
            ["engine.name=vllm", "engine.server.max_model_len=2048"],
            "engine.server.max_model_len: 2048: the model has 1024 positions (max_position_embeddings)",
        ),
        (
            1,
            ["engine.name=vllm", "engine.server.start_timeout_seconds=600"],
            "engine.server.start_timeout_seconds: 600: other ranks wait only "
            "run.collective_timeout_seconds = 600; "
            "take less",
        ),
        (
            1,
            [*FP8, "precision.recipe=fp32"],
            "engine.server.quantization: fp8_block: servers of such models compute in bfloat16; take "
            "precision.recipe bf16",
        ),
        (
            1,
            [*FP8, "weights.layout=sharded"],
            "engine.server.quantization: fp8_block: weights.layout sharded has no place for scales; "
            "take full, or "
            "auto, which is full then",
        ),
        (
            1,
            [*FP8, "engine.server.tensor_parallel=2"],
            "engine.server.quantization: fp8_block: an engine rank would hold query rows 192, key "
            "rows 64: no "
            "multiples of 128, the rows of a "
            "block",
        ),
        (
            1,
            [*FP8, "weights.delta=true"],
            "engine.server.quantization: fp8_block: weights.delta: layers of a quantised model are "
            "loaded whole",
        ),
    ],
)
def test_a_mistake_is_told_with_what_is_allowed(problems_of, world_size, overrides, expected):
    assert problems_of(world_size, *overrides) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine.name=vllm", "weights.delta=true", "weights.probe_tokens=1016"],
        ["engine.name=vllm", "weights.delta=true", "weights.layout=full", "weights.transport.kind=disk"],
        ["weights.bucket_bytes=1000000"],
        FP8,
        [
            "engine.name=vllm",
            "engine.server.replicas=2",
            "engine.server.tensor_parallel=2",
            "engine.server.max_model_len=768",
        ],
        [
            "engine.name=vllm",
            "engine.server.addresses=['http://10.0.0.1:8000','https://[::1]:80']",
            "engine.server.options={block_size: 32}",
        ],
    ],
)
def test_what_can_run_is_left_alone(problems_of, overrides):
    assert problems_of(2, *overrides) == []
