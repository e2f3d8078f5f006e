"""What needs an accelerator, Transformer Engine or room in shared memory is told before a model is built."""

import pytest
import torch
from checked_runs import FULL_GPU, MODEL, NO_GPU, problems_of

from megagrpo.config.hardware import Hardware
from megagrpo.config.load import load_config
from megagrpo.errors import ConfigError


def test_transformer_engine_is_accepted_where_it_can_run(run_file):
    overrides = ["precision.recipe=fp8_delayed", "model.attention=te"]
    assert problems_of(run_file, *overrides, hardware=FULL_GPU) == []
    no_package = Hardware(torch_cuda="13.0", nvidia_device=True, transformer_engine=False)
    assert [line.split(": ")[0] for line in problems_of(run_file, *overrides, hardware=no_package)] == [
        "precision.recipe",
        "model.attention",
    ]


def test_fp8_is_refused_with_layers_that_ignore_it(run_file):
    overrides = ["precision.recipe=fp8_delayed", "model.attention=local"]
    assert problems_of(run_file, *overrides, hardware=FULL_GPU) == [
        "precision.recipe: fp8_delayed: the layers of model.attention: local compute no FP8, and would train "
        "in bf16; use auto or te"
    ]


@pytest.mark.parametrize(
    ("overrides", "experts", "hardware", "expected"),
    [
        (["update.recompute=moe_act"], 8, NO_GPU, "moe_act: needs the grouped experts of Transformer Engine"),
        (
            ["update.recompute=[moe_act]", "precision.recipe=bf16"],
            None,
            FULL_GPU,
            "moe_act: the model has no",
        ),
        (["update.recompute=[mlp]"], 8, NO_GPU, "mlp: every layer of the model has experts; take moe_act"),
        (
            ["update.recompute=[layernorm]", "precision.recipe=fp8_delayed"],
            None,
            FULL_GPU,
            "layernorm: would move the amax history of precision.recipe: fp8_delayed twice",
        ),
        (["update.recompute=[moe_act,layernorm]", "precision.recipe=bf16"], 8, FULL_GPU, None),
        (["update.recompute=[mlp,layernorm,core_attn]"], None, NO_GPU, None),
        (["update.recompute=full", "precision.recipe=fp8_delayed"], None, FULL_GPU, None),
    ],
)
def test_parts_that_the_layers_do_not_compute_again_are_refused(
    run_file, overrides, experts, hardware, expected
):
    model = MODEL | ({"num_experts": experts} if experts else {})
    told = problems_of(run_file, *overrides, model=model, hardware=hardware)
    if expected is None:
        assert told == []
    else:
        (line,) = told
        assert line.startswith(f"update.recompute: {expected}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision.recipe=mxfp8"], []),
        (["precision.recipe=fp8_blockwise", "model.attention=local"], []),
        (
            ["precision.recipe=bf16"],
            [
                "precision.emulate: true: precision.recipe: bf16 is computed as it is; take one of "
                "fp8_delayed, fp8_tensorwise, fp8_blockwise, mxfp8"
            ],
        ),
        (
            ["precision.recipe=mxfp8", "model.attention=te"],
            ["precision.emulate: true: layers of Transformer Engine compute on their own; use auto or local"],
        ),
        (
            ["precision.recipe=fp8_delayed", "update.recompute=full"],
            ["precision.emulate: true: update.recompute would move the scales of fp8_delayed twice"],
        ),
    ],
)
@pytest.mark.parametrize("hardware", [NO_GPU, FULL_GPU])
def test_a_float8_recipe_can_be_emulated_on_any_machine_in_local_layers(
    run_file, overrides, expected, hardware
):
    told = problems_of(run_file, "precision.emulate=true", *overrides, hardware=hardware)
    assert [line for line in told if line.startswith("precision.")] == expected


@pytest.mark.parametrize(
    ("overrides", "free", "fits"),
    [
        ([], 9_957_277_696, True),
        ([], 9_957_277_695, False),
        (["weights.transport.kind=shared_memory"], 64 * 2**20, False),
        (["weights.transport.kind=disk"], 64 * 2**20, True),
        (["weights.transport.kind=group"], 64 * 2**20, True),
        ([], None, True),
    ],
)
def test_weights_that_do_not_fit_in_shared_memory_are_told_before_an_engine_starts(
    run_file, overrides, free, fits
):
    """Qwen3-8B: the embedding is 151,936 x 4,096 in bfloat16, two slots for each of four replicas."""
    model = MODEL | {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288}
    told = problems_of(
        run_file,
        *["engine.name=vllm", "engine.server.replicas=4", "precision.recipe=bf16", *overrides],
        world_size=8,
        model=model,
        hardware=Hardware(None, False, False, shared_memory_bytes=free),
    )
    found = [line for line in told if "/dev/shm" in line]
    assert len(found) == (not fits)
    assert fits or "2 slots of 1.24 GB for each of 4 replicas need 9.96 GB in /dev/shm, which has" in found[0]


def test_auto_needs_no_shared_memory_on_gpus(run_file):
    hardware = Hardware("13.0", True, True, shared_memory_bytes=0)
    told = problems_of(run_file, "engine.name=vllm", "precision.recipe=bf16", hardware=hardware)
    assert not [line for line in told if "/dev/shm" in line]


def test_full_is_named_alone_and_none_is_an_empty_list(run_file):
    assert load_config(run_file, ["update.recompute=none"]).update.recompute == ()
    with pytest.raises(ConfigError, match="full computes whole layers again; name it alone"):
        load_config(run_file, ["update.recompute=[full,mlp]"])


def test_the_engine_in_the_ranks_cannot_sample_deterministically_on_a_gpu(run_file):
    """torch's own list of what raises names the cumulative sum that sampling is made of."""
    raises = torch.use_deterministic_algorithms.__doc__
    assert "torch.cumsum` when called on a CUDA tensor when dtype is floating point" in " ".join(
        raises.split()
    )
    on = "run.deterministic=true"
    (line,) = problems_of(run_file, on, hardware=FULL_GPU)
    assert line == (
        "run.deterministic: true: engine.name transformers samples in the ranks, with cumulative sums that "
        "torch refuses on CUDA then; take vllm or sglang, or leave it out"
    )
    assert problems_of(run_file, on, "engine.name=vllm", hardware=FULL_GPU) == []
    assert problems_of(run_file, on) == []
