"""Checks of what needs an accelerator or Transformer Engine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megagrpo.config.engine_sections import EngineConfig, WeightsConfig
from megagrpo.config.expert_fields import count_experts
from megagrpo.config.hardware import Hardware
from megagrpo.config.training_sections import PrecisionConfig
from megagrpo.parallel.alignment import FP8_ALIGNMENT

SLOTS_OF_A_REPLICA = 2  # buckets of weights on their way at once


def check_hardware(
    precision: PrecisionConfig,
    attention: str,
    recompute: Sequence[str],
    engine: EngineConfig,
    weights: WeightsConfig,
    hf_config: Mapping[str, Any],
    hardware: Hardware,
) -> Iterator[str]:
    """Yield what is wrong, one line each.

    Args:
        precision: that of the run; `attention` is `model.attention`, `recompute` `update.recompute`.
        engine: it decides, with `weights`, whether buckets lie in shared memory.
        hf_config: the model's `config.json`; empty skips what depends on the model.
        hardware: what the machine has.
    """
    recipe, emulates = precision.recipe, precision.emulate
    if emulates:
        yield from _check_emulation(recipe, attention, recompute)
    if recipe in FP8_ALIGNMENT and attention == "local" and not emulates:
        yield (
            f"precision.recipe: {recipe}: the layers of model.attention: local compute no "
            "FP8, and would train in bf16; use auto or te"
        )
    missing = " and ".join(hardware.missing_for_transformer_engine())
    if missing and recipe in FP8_ALIGNMENT and not emulates:
        yield (
            f"precision.recipe: {recipe}: needs Transformer Engine on CUDA; missing "
            f"here: {missing}; use fp32 or bf16, or precision.emulate to study it"
        )
    if missing and attention == "te":
        yield (
            f"model.attention: te: needs Transformer Engine on CUDA; missing here: {missing}; use auto or "
            "local"
        )
    takes_te = attention == "te" or (
        attention == "auto" and not missing and recipe != "fp32" and not emulates
    )
    yield from _check_recompute(recompute, recipe, hf_config, takes_te)
    itemsize = 4 if recipe == "fp32" or emulates else 2
    yield from _check_shared_memory(engine, weights, itemsize, hf_config, hardware)


def _check_emulation(recipe: str, attention: str, recompute: Sequence[str]) -> Iterator[str]:
    if recipe not in FP8_ALIGNMENT:
        yield (
            f"precision.emulate: true: precision.recipe: {recipe} is computed as it is; take one of "
            f"{', '.join(FP8_ALIGNMENT)}"
        )
    if attention == "te":
        yield "precision.emulate: true: layers of Transformer Engine compute on their own; use auto or local"
    if recipe == "fp8_delayed" and recompute:
        yield "precision.emulate: true: update.recompute would move the scales of fp8_delayed twice"


def check_deterministic(is_on: bool, engine: EngineConfig, hardware: Hardware) -> Iterator[str]:
    """Yield one line where `run.deterministic` would end the first rollout: torch has no deterministic
    cumulative sum on CUDA, and the engine in the ranks samples with it.
    """
    has_cuda = hardware.nvidia_device and hardware.torch_cuda is not None
    if is_on and has_cuda and getattr(engine, "server", None) is None:
        yield (
            f"run.deterministic: true: engine.name {engine.name} samples in the ranks, with cumulative sums "
            "that torch refuses on CUDA then; take vllm or sglang, or leave it out"
        )


def check_memory(
    offload: Sequence[str], sleeps: bool, has_reference: bool, precision: PrecisionConfig
) -> Iterator[str]:
    """Yield what would save no memory, one line each.

    Args:
        offload: `update.offload`; `sleeps` is `engine.sleep_while_training`.
        has_reference: whether there is one.
        precision: that of the run.
    """
    if offload and not sleeps:
        yield (
            f"update.offload: {', '.join(offload)}: comes back for each update, while the engine keeps its "
            "memory; set engine.sleep_while_training: true, or leave it out"
        )
    if "reference" in offload and not has_reference:
        yield "update.offload: reference: algorithm.kl.coef is 0, there is none; leave it out"
    if precision.gradients == "bf16" and (precision.recipe == "fp32" or precision.emulate):
        yield (
            "precision.gradients: bf16: buffers have the type of the parameters, float32 under this "
            "precision.recipe; take fp32, or recipe bf16"
        )


def _check_recompute(
    parts: Sequence[str], recipe: str, hf_config: Mapping[str, Any], takes_te: bool
) -> Iterator[str]:
    """Yield the parts that the model does not have, or its layers do not recompute."""
    has_experts = count_experts(hf_config) is not None
    if "moe_act" in parts and hf_config and not has_experts:
        yield "update.recompute: moe_act: the model has no experts; leave it out"
    if "moe_act" in parts and not takes_te:
        yield (
            "update.recompute: moe_act: needs the grouped experts of Transformer Engine; take full, or "
            "leave it out"
        )
    if "mlp" in parts and has_experts:
        yield "update.recompute: mlp: every layer of the model has experts; take moe_act"
    clash = [part for part in ("layernorm", "moe_act") if part in parts]
    if recipe == "fp8_delayed" and clash:
        yield (
            f"update.recompute: {clash[0]}: would move the amax history of precision.recipe: fp8_delayed "
            "twice; take another recipe, or leave it out"
        )


def _check_shared_memory(
    engine: EngineConfig,
    weights: WeightsConfig,
    itemsize: int,
    hf_config: Mapping[str, Any],
    hardware: Hardware,
) -> Iterator[str]:
    """Yield one line where slots of weights, whose elements have `itemsize` bytes, would not fit in /dev/shm:
    a container's default is 64 MB.
    """
    server, kind = getattr(engine, "server", None), weights.transport.kind
    if server is None:
        return
    # auto: on GPUs it is ipc, with servers elsewhere a group
    is_auto_here = kind == "auto" and not hardware.nvidia_device and not server.addresses
    vocabulary, hidden = hf_config.get("vocab_size"), hf_config.get("hidden_size")
    if not isinstance(vocabulary, int) or not isinstance(hidden, int):
        return
    if kind != "shared_memory" and not is_auto_here:
        return
    intermediate = hf_config.get("intermediate_size")
    # a slot holds the largest that an engine takes at once: the embedding, or a fused gate and up projection
    rows = max(vocabulary, 2 * intermediate if isinstance(intermediate, int) else 0)
    slot = rows * hidden * itemsize
    needed = SLOTS_OF_A_REPLICA * server.num_replicas * slot
    free = hardware.shared_memory_bytes
    if free is not None and needed > free:
        yield (
            f"weights.transport.kind: {kind}: {SLOTS_OF_A_REPLICA} slots of {slot / 1e9:.2f} GB for each of "
            f"{server.num_replicas} replicas need {needed / 1e9:.2f} GB in /dev/shm, which has "
            f"{free / 1e9:.2f} GB free; give the container more (docker run --shm-size), or take group "
            "or disk"
        )
