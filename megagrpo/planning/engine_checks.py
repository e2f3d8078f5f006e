"""Checks of `engine:`, alone and against the rest of the run."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from megagrpo.config.engine_sections import FP8_BLOCK, EngineConfig, ServerConfig, WeightsConfig
from megagrpo.config.rollout_sections import DataConfig, RolloutConfig
from megagrpo.config.training_sections import PrecisionConfig


def check_engine(
    engine: EngineConfig,
    weights: WeightsConfig,
    rollout: RolloutConfig,
    precision: PrecisionConfig,
    data: DataConfig,
    collective_timeout_seconds: int,
    world_size: int,
    hf_config: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what is wrong, one line each."""
    if engine.sleep_while_training and rollout.off_policy != "synchronous":
        yield (
            f"engine.sleep_while_training: true: rollout.off_policy {rollout.off_policy} generates "
            "during updates"
        )
    server: ServerConfig | None = getattr(engine, "server", None)
    if server is None:
        yield from _check_unused_weights(weights, engine.name)
        return
    if getattr(server, "offline", False) and server.addresses:
        yield "engine.server.offline: true: engine.server.addresses names servers that run already"
    yield from _check_replicas(server, world_size)
    if weights.delta and engine.sleep_while_training and not server.sleep_keeps_weights:
        yield (
            "weights.delta: true: engine.sleep_while_training drops the weights that changes would be to; "
            "take engine.server.sleep_keeps_weights: true"
        )
    for field in ("start_timeout_seconds", "request_timeout_seconds"):
        if getattr(server, field) >= collective_timeout_seconds:
            yield (
                f"engine.server.{field}: {getattr(server, field):g}: other ranks wait only "
                f"run.collective_timeout_seconds = {collective_timeout_seconds}; take less"
            )
    yield from _check_tensor_parallel(server, hf_config)
    yield from _check_quantization(server, weights, precision, hf_config)
    longest = data.max_prompt_tokens + rollout.max_new_tokens
    if server.max_model_len is not None and server.max_model_len < longest:
        yield (
            f"engine.server.max_model_len: {server.max_model_len}: data.max_prompt_tokens "
            f"{data.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens} = {longest}"
        )
    positions = hf_config.get("max_position_embeddings")
    if server.max_model_len is not None and isinstance(positions, int) and server.max_model_len > positions:
        yield (
            f"engine.server.max_model_len: {server.max_model_len}: the model has {positions} positions "
            "(max_position_embeddings)"
        )


def _check_unused_weights(weights: WeightsConfig, engine_name: str) -> Iterator[str]:
    default = WeightsConfig()
    for field in WeightsConfig.model_fields:
        if field != "bucket_bytes" and getattr(weights, field) != getattr(default, field):
            yield (
                f"weights.{field}: {getattr(weights, field)}: engine.name {engine_name} lives in the ranks, "
                "weights are copied into it directly"
            )


def _check_replicas(server: ServerConfig, world_size: int) -> Iterator[str]:
    if server.addresses and server.replicas not in (1, len(server.addresses)):
        yield (
            f"engine.server.replicas: {server.replicas}: engine.server.addresses names "
            f"{len(server.addresses)}; leave "
            "one of them out"
        )
    if server.num_replicas > world_size:
        place = "addresses" if server.addresses else "replicas"
        yield (
            f"engine.server.{place}: {server.num_replicas} replicas: at most one for each of the "
            f"{world_size} ranks"
        )
    for position, address in enumerate(server.addresses):
        if "@" in address:  # not repeated: it would be on the screen, as the run's config.yaml would keep it
            yield (
                f"engine.server.addresses.{position}: names a user or a password; http://HOST:PORT is wanted"
            )
            continue
        try:
            parts = urlsplit(address)
            good = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port is not None
        except ValueError:  # a port that is no number
            good = False
        if not good:
            yield f"engine.server.addresses.{position}: {address}: is not of the form http://HOST:PORT"


def _check_tensor_parallel(server: ServerConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    size = server.tensor_parallel
    heads = hf_config.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    groups = hf_config.get("num_key_value_heads") or heads
    if heads % size or (groups % size and size % groups):
        works = [
            tp for tp in range(1, heads + 1) if heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)
        ]
        yield (
            f"engine.server.tensor_parallel: {size}: does not divide the model's {heads} attention heads and "
            f"{groups} key/value heads; "
            f"these do: {', '.join(map(str, works))}"
        )


def _check_quantization(
    server: ServerConfig, weights: WeightsConfig, precision: PrecisionConfig, hf_config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what keeps a server's model from being quantised in blocks; its ranks hold whole ones."""
    if server.quantization == "none":
        return
    place = f"engine.server.quantization: {server.quantization}"
    if precision.recipe == "fp32" or precision.emulate:
        yield f"{place}: servers of such models compute in bfloat16; take precision.recipe bf16"
    if weights.layout == "sharded":
        yield (
            f"{place}: weights.layout sharded has no place for scales; take full, or auto, which is full then"
        )
    if weights.delta:
        yield f"{place}: weights.delta: layers of a quantised model are loaded whole"
    heads, hidden = hf_config.get("num_attention_heads"), hf_config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    groups = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    rows = {
        "query rows": heads * head_dim // server.tensor_parallel,
        "key rows": max(groups // server.tensor_parallel, 1) * head_dim,
    }
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(hf_config.get(name), int):
            rows[name] = hf_config[name] // server.tensor_parallel
    wrong = [f"{name} {size}" for name, size in rows.items() if size % FP8_BLOCK]
    if wrong:
        yield (
            f"{place}: an engine rank would hold {', '.join(wrong)}: no multiples of {FP8_BLOCK}, the "
            "rows of a block"
        )
