"""What a GPU holds in each phase of a step: the trainer's part as measured on a model without memory, the
activations and the engine's part as computed here.

    start    what stays of them, the engine with a cache for one sequence, what it is to leave free
    update   weights + gradients + optimizer + reference + activations     the engine asleep, if it sleeps
    publish  what stays of them, the engine, two slots of weights
    rollout  what stays of them, the engine: its weights, its cache
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megagrpo.config.engine_sections import EngineConfig
from megagrpo.config.expert_fields import count_experts
from megagrpo.config.training_sections import ParallelConfig, PrecisionConfig, UpdateConfig

CONTEXT_BYTES = 3e9  # CUDA's context, NCCL's buffers, workspaces of GEMMs; an estimate
ASLEEP_BYTES = 1.5e9  # context and CUDA graphs of an engine that sleeps; an estimate
ENGINE_BYTES = 2e9  # the activations and graphs of an engine; an estimate
SLOTS = 2
PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "engine", "cache", "other")


@dataclass(frozen=True)
class TrainerBytes:
    """What a rank of a stage holds; see policy/resident.py."""

    stage: int
    stages: int
    layers: int
    weights: int
    gradients: int
    optimizer: int
    whole_parameters: int
    largest_parameter: int


@dataclass(frozen=True)
class MemorySettings:
    """What of a configuration decides over memory."""

    parallel: ParallelConfig
    precision: PrecisionConfig
    update: UpdateConfig
    engine: EngineConfig
    has_reference: bool
    longest_tokens: int  # the longest sequence
    bucket_bytes: int
    hf: Mapping[str, Any]  # config.json
    gpu_bytes: float

    @property
    def item_bytes(self) -> int:
        """Of a weight or an activation."""
        return 4 if self.precision.recipe == "fp32" or self.precision.emulate else 2


@dataclass(frozen=True)
class Phase:
    """One phase of one kind of rank."""

    name: str
    stage: int
    bytes: Mapping[str, float]  # by part

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.bytes.values())


def plan_phases(settings: MemorySettings, held: Sequence[TrainerBytes]) -> list[Phase]:
    """Return the phases of each kind of rank."""
    whole = sum(each.stages * each.whole_parameters for each in held)
    return [phase for each in held for phase in _phases_of(settings, each, whole)]


def _phases_of(settings: MemorySettings, held: TrainerBytes, whole_parameters: int) -> list[Phase]:
    trained = {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "reference": held.weights if settings.has_reference else 0,
    }
    stays = {name: 0 if name in settings.update.offload else size for name, size in trained.items()}
    own, cache = _engine_bytes(settings, whole_parameters, sum(stays.values()))
    awake = {"engine": own, "cache": cache}
    sleeps = settings.engine.sleep_while_training and is_colocated(settings.engine)
    resting = {"engine": ASLEEP_BYTES, "cache": 0.0} if sleeps and own else awake
    slot = max(settings.bucket_bytes, held.largest_parameter * settings.item_bytes) if own else 0
    other = {"other": CONTEXT_BYTES}
    free = settings.gpu_bytes - CONTEXT_BYTES - sum(stays.values())
    least = {"engine": own, "cache": least_cache(settings) if own else 0.0}
    start = stays | least | {"other": CONTEXT_BYTES + (1 - _granted_fraction(settings.engine)) * free}
    update = trained | {"activations": activation_bytes(settings, held)} | resting | other
    return [
        *([Phase("start", held.stage, start)] if own else []),
        Phase("update", held.stage, update),
        Phase("publish", held.stage, stays | awake | {"other": CONTEXT_BYTES + SLOTS * slot}),
        Phase("rollout", held.stage, stays | awake | other),
    ]


def is_colocated(engine: EngineConfig) -> bool:
    """Say whether engines compute on the ranks' GPUs."""
    return not engine.given_addresses


def _engine_bytes(settings: MemorySettings, whole_parameters: int, stays: float) -> tuple[float, float]:
    """Return the engine's own bytes on a GPU, and those of its cache of keys and values."""
    engine = settings.engine
    if not is_colocated(engine):
        return 0.0, 0.0
    server = getattr(engine, "server", None)
    if server is None:  # all of the model in each rank, and a cache for the rows that are decoded
        rows = engine.max_batch_completions * settings.longest_tokens
        return whole_parameters * settings.item_bytes, rows * cache_bytes_of_token(settings, 1)
    item_bytes = 1 if engine.is_quantized else settings.item_bytes
    own = whole_parameters * item_bytes / server.tensor_parallel + ENGINE_BYTES
    if server.kv_cache_bytes is not None:
        return own, server.kv_cache_bytes / server.tensor_parallel
    granted = _granted_fraction(engine) * (settings.gpu_bytes - CONTEXT_BYTES - stays)
    return own, max(granted - own, least_cache(settings))


def _granted_fraction(engine: EngineConfig) -> float:
    """Return what servers take of the memory that is free when they start; engines in the ranks all of it."""
    server = getattr(engine, "server", None)
    return 1.0 if server is None else server.gpu_memory_fraction


def least_cache(settings: MemorySettings) -> float:
    """Return what the cache of an engine's rank needs for one sequence of the greatest length."""
    server = getattr(settings.engine, "server", None)
    return settings.longest_tokens * cache_bytes_of_token(settings, server.tensor_parallel if server else 1)


def cache_bytes_of_token(settings: MemorySettings, tensor_parallel: int) -> float:
    """Return the bytes of a token's keys and values on one rank of an engine."""
    hf = settings.hf
    layers = hf.get("num_hidden_layers", 0)
    if hf.get("kv_lora_rank"):  # latent attention: one vector for all heads, on every rank
        return layers * (hf["kv_lora_rank"] + hf.get("qk_rope_head_dim", 0)) * settings.item_bytes
    heads, head_dim = _key_heads(hf)
    return 2 * layers * -(-heads // tensor_parallel) * head_dim * settings.item_bytes


def activation_bytes(settings: MemorySettings, held: TrainerBytes) -> float:
    """Return what the layers of a stage keep for the backward pass, as counted from the layers' inputs.

    A token keeps, in each layer, the inputs of both norms and of both blocks (4 h), queries, keys, values
    and what attention makes of them, and of a gated MLP of width f what enters its activation (2 f) and what
    leaves it (f), with fused kernels. Stage s of p keeps p - s micro-batches; cp and tp share tokens out,
    without sp of what is not h.
    """
    hf, parallel, parts = settings.hf, settings.parallel, settings.update.recompute
    hidden = hf.get("hidden_size", 0)
    heads, head_dim = _key_heads(hf)
    inputs = 4 * hidden - (2 * hidden if "layernorm" in parts else 0)
    attention = 2 * head_dim * (hf.get("num_attention_heads", 0) + heads)
    num_experts = count_experts(hf)
    if num_experts:
        chosen = hf.get("num_experts_per_tok", 1)
        width = chosen * hf.get("moe_intermediate_size", hf.get("intermediate_size", 0))
        mlp = 2 * width + (0 if "moe_act" in parts else width) + 2 * chosen * hidden
    else:
        mlp = 0 if "mlp" in parts else 3 * hf.get("intermediate_size", 0)
    of_hidden = parallel.tp if parallel.sp else 1
    layer = inputs / of_hidden + (attention + mlp) / parallel.tp
    tokens = settings.update.max_tokens_per_microbatch / parallel.cp
    alive = parallel.pp - held.stage
    if "full" in parts:  # the input of each layer, and all of the one that is computed again
        kept = held.layers * alive * hidden / of_hidden + layer
    else:
        kept = held.layers * alive * layer
    return tokens * kept * settings.item_bytes


def _key_heads(hf: Mapping[str, Any]) -> tuple[int, int]:
    heads = hf.get("num_attention_heads", 1)
    return hf.get("num_key_value_heads") or heads, hf.get("head_dim") or hf.get("hidden_size", 0) // heads


def find_worst(phases: Sequence[Phase]) -> Phase:
    """Return the phase that holds most."""
    return max(phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class SuggestedChange:
    """A change of the configuration, and the phases after it."""

    text: str
    settings: MemorySettings
    held: Sequence[TrainerBytes]
    saved_bytes: float  # in the phase that it helps most


def suggest_changes(settings: MemorySettings, held: Sequence[TrainerBytes]) -> list[SuggestedChange]:
    """Return what to change until all phases fit, in the order in which it costs least: nothing, time, then
    exactness. Empty where they fit.
    """
    found: list[SuggestedChange] = []
    for text, changed in _candidates(settings):
        before = plan_phases(settings, held)
        if not _excess(before, settings):
            break
        settings_after = changed(settings)
        held_after = _with_narrow_gradients(settings, settings_after, held)
        after = plan_phases(settings_after, held_after)
        if _excess(after, settings) < _excess(before, settings):
            settings, held = settings_after, held_after
            saved = max(old.total - new.total for old, new in zip(before, after, strict=True))
            found.append(SuggestedChange(text, settings, held, saved))
    return found


def _excess(phases: Sequence[Phase], settings: MemorySettings) -> float:
    """Return the bytes that are too many, of all phases together."""
    return sum(max(0.0, phase.total - settings.gpu_bytes) for phase in phases)


def _with_narrow_gradients(
    before: MemorySettings, after: MemorySettings, held: Sequence[TrainerBytes]
) -> Sequence[TrainerBytes]:
    if before.precision.gradients == after.precision.gradients:
        return held
    return [replace(each, gradients=each.gradients // 2) for each in held]


def _candidates(settings: MemorySettings) -> list[tuple[str, Any]]:
    def update(**fields: Any) -> Any:
        return lambda now: replace(now, update=now.update.model_copy(update=fields))

    parts = ["gradients", "optimizer", *(["reference"] if settings.has_reference else [])]
    fewest = max(settings.longest_tokens, settings.update.max_tokens_per_microbatch // 2)
    found: list[tuple[str, Any]] = []
    if is_colocated(settings.engine):
        asleep = lambda now: replace(  # noqa: E731
            now, engine=now.engine.model_copy(update={"sleep_while_training": True})
        )
        found.append(("engine.sleep_while_training: true", asleep))
        found.append((f"update.offload: [{', '.join(parts)}]", update(offload=tuple(parts))))
    if fewest < settings.update.max_tokens_per_microbatch:
        found.append(
            (f"update.max_tokens_per_microbatch: {fewest}", update(max_tokens_per_microbatch=fewest))
        )
    found.append(("update.recompute: full", update(recompute=("full",))))
    if settings.precision.recipe != "fp32" and not settings.precision.emulate:
        narrow = lambda now: replace(  # noqa: E731
            now, precision=now.precision.model_copy(update={"gradients": "bf16"})
        )
        found.append(("precision.gradients: bf16", narrow))
    return found
