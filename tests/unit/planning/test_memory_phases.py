"""What a GPU holds in each phase, by hand on round numbers."""

import pytest

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.config.training_sections import ParallelConfig, PrecisionConfig, UpdateConfig
from megagrpo.planning.memory_phases import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    ENGINE_BYTES,
    MemorySettings,
    TrainerBytes,
    activation_bytes,
    cache_bytes_of_token,
    plan_phases,
)

GB = 10**9
HELD = TrainerBytes(0, 1, 10, 2 * GB, 4 * GB, 6 * GB, 2 * GB, GB // 100)
HF = {
    "hidden_size": 1000,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "intermediate_size": 3000,
}


def settings_of(update=None, server=None, parallel=None, has_reference=False, hf=HF, **engine):
    return MemorySettings(
        ParallelConfig(**(parallel or {})),
        PrecisionConfig(recipe="bf16"),
        UpdateConfig(max_tokens_per_microbatch=1000, **(update or {})),
        build_engine_config("vllm", server={"tensor_parallel": 2, **(server or {})}, **engine),
        has_reference,
        longest_tokens=1000,
        bucket_bytes=2**26,
        hf=hf,
        gpu_bytes=50 * GB,
    )


def phases_of(*args, **kwargs):
    return {phase.name: phase for phase in plan_phases(settings_of(*args, **kwargs), [HELD])}


def test_an_engine_takes_its_share_of_what_the_trainer_leaves():
    """12 of 50 GB are the trainer's, 3 the context's: 0.8 of the other 35 are 28, all but 4 the cache's."""
    rollout = phases_of(server={"gpu_memory_fraction": 0.8})["rollout"]
    assert rollout.bytes["engine"] == 2 * GB * 2 / 2 + ENGINE_BYTES == 4 * GB
    assert rollout.bytes["cache"] == pytest.approx(24 * GB)
    assert rollout.total == pytest.approx(12 * GB + 28 * GB + CONTEXT_BYTES)


def test_what_leaves_the_device_is_there_in_the_update_alone():
    phases = phases_of({"offload": ("gradients", "optimizer")}, sleep_while_training=True)
    for name in ("start", "publish", "rollout"):
        assert (phases[name].bytes["gradients"], phases[name].bytes["optimizer"]) == (0, 0)
    update = phases["update"].bytes
    assert (update["gradients"], update["optimizer"]) == (4 * GB, 6 * GB)
    assert (update["engine"], update["cache"]) == (ASLEEP_BYTES, 0)


def test_an_engine_that_does_not_sleep_keeps_its_memory_in_the_update():
    phases = phases_of()
    assert phases["update"].bytes["cache"] == phases["rollout"].bytes["cache"] > 0


def test_engines_elsewhere_take_nothing_here():
    phases = phases_of(server={"addresses": ["http://a:1"]})
    assert "start" not in phases
    assert all(phase.bytes["engine"] == phase.bytes["cache"] == 0 for phase in phases.values())


def test_an_engine_that_gets_less_than_its_weights_and_one_sequence_does_not_start():
    phases = phases_of(server={"gpu_memory_fraction": 0.1})  # 3.5 GB for 4 GB and a cache
    assert phases["start"].total > 50 * GB
    assert phases_of(server={"gpu_memory_fraction": 0.2})["start"].total < 50 * GB


def test_a_token_of_the_cache_is_a_key_and_a_value_in_each_layer():
    """2 x 10 layers x 1 head of 2 on each of two ranks x 100 x 2 bytes; four ranks hold copies."""
    assert cache_bytes_of_token(settings_of(), 2) == cache_bytes_of_token(settings_of(), 4) == 4000
    latent = HF | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert cache_bytes_of_token(settings_of(hf=latent), 2) == 10 * 576 * 2


@pytest.mark.parametrize(
    ("update", "parallel", "values"),
    [  # of a token in a layer: 4 x 1000 inputs, 100 x (2 x 10 + 2 x 2) in attention, 3 x 3000 in the MLP
        ({}, {}, 10 * (4000 + 2400 + 9000)),
        ({"recompute": ["layernorm"]}, {}, 10 * (2000 + 2400 + 9000)),
        ({"recompute": ["mlp"]}, {}, 10 * (4000 + 2400)),
        ({"recompute": ["full"]}, {}, 10 * 1000 + 4000 + 2400 + 9000),
        ({}, {"tp": 2}, 10 * (4000 + 1200 + 4500)),
        ({}, {"tp": 2, "sp": True}, 10 * (2000 + 1200 + 4500)),
        ({}, {"cp": 2}, 10 * (4000 + 2400 + 9000) / 2),
        ({}, {"pp": 3}, 3 * 10 * (4000 + 2400 + 9000)),  # the first stage runs three micro-batches ahead
    ],
)
def test_activations_are_counted_from_the_inputs_of_layers(update, parallel, values):
    settings = settings_of(update, parallel=parallel)
    assert activation_bytes(settings, HELD) == pytest.approx(1000 * 2 * values)
