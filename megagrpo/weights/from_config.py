"""Builds a run's publisher from its configuration."""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import torch

from megagrpo.config.engine_sections import EngineConfig, WeightsConfig
from megagrpo.device.device import has_cuda
from megagrpo.engines.base import EmbeddedEngine, Engine
from megagrpo.engines.bucket_engine import BucketEngine
from megagrpo.engines.replicas import owner_of_replica, replica_of_rank
from megagrpo.errors import UserError
from megagrpo.models.stage import StageModel
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder
from megagrpo.policy.reference import Reference
from megagrpo.telemetry.activity import Counts, count_nothing
from megagrpo.types import Prompt
from megagrpo.weights.context import PublishContext
from megagrpo.weights.export import WeightExporter
from megagrpo.weights.local_publisher import LocalPublisher
from megagrpo.weights.plan.publish_plan import PublishPlan
from megagrpo.weights.plan.sources import build_sources
from megagrpo.weights.plan.targets import EngineGrid
from megagrpo.weights.probe import LogprobProbe, choose_prompts
from megagrpo.weights.publisher import Publisher
from megagrpo.weights.read.block_fp8 import quantize_sources
from megagrpo.weights.read.quantizing_reader import QuantizingReader
from megagrpo.weights.read.slice_reader import SliceReader
from megagrpo.weights.remote_publisher import RemotePublisher
from megagrpo.weights.selection.base import Everything
from megagrpo.weights.selection.changed_weights import Changes
from megagrpo.weights.transports.base import SLOTS, Transport
from megagrpo.weights.transports.disk import DiskTransport
from megagrpo.weights.transports.group import GroupTransport
from megagrpo.weights.transports.ipc import IpcTransport
from megagrpo.weights.transports.shared_memory import SharedMemoryTransport

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport
    for transport in (SharedMemoryTransport, GroupTransport, DiskTransport, IpcTransport)
}

# Means over a replica's tokens. Right weights give single gaps of some 2e-5 in float32 and up to 0.2 rounded
# to bfloat16 and below; wrong ones were seen to give 0.5 to 7.
PROBE_MAX_GAP = {"fp32": 1e-3}
PROBE_MAX_GAP_ROUNDED = 0.25

# one wait of the first engine rank for the trainer, two of the other engine ranks for the first, one to load
GROUP_WAITS_IN_A_REQUEST = 4


def is_own_address(host: str) -> bool:
    """Say whether `host` is this machine: only its own addresses can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def choose_transport(
    wanted: str, offered: Sequence[str], engine_host: str, are_started_here: bool = True
) -> str:
    """Return the transport of a run. Collective over all ranks.

    `auto`: shared memory where all ranks and engines are on one machine, else a process group with the
    engines' ranks.

    Args:
        engine_host: of this rank's engine.
        are_started_here: the engines were started by the run, so each is on the GPUs of its ranks.

    Raises:
        UserError: `shared_memory` over several machines, `ipc` without CUDA, `group` with engines on the
            ranks' GPUs, or a transport that the engine does not read.
    """
    places = all_gather_metadata((socket.gethostname(), engine_host, is_own_address(engine_host)))
    hosts = {host for host, *_ in places} | {engine for _, engine, is_here in places if not is_here}
    name, shares_gpus = wanted, has_cuda() and are_started_here
    if wanted == "auto":
        by_ipc = shares_gpus and "ipc" in offered
        name = "ipc" if by_ipc else "shared_memory" if len(hosts) == 1 else "group"
    if name == "group" and shares_gpus:
        raise UserError(
            "weights.transport.kind: group: engines that the run starts are on the GPUs of its ranks, and "
            "NCCL connects no two processes on one GPU; take ipc, shared_memory or disk"
        )
    if name == "shared_memory" and len(hosts) > 1:
        raise UserError(
            f"weights.transport.kind: shared_memory: ranks and engines are on {len(hosts)} hosts; "
            "take group or disk"
        )
    if name == "ipc" and not has_cuda():
        raise UserError(
            "weights.transport.kind: ipc: opens GPU memory in the engine's process; no CUDA device is here"
        )
    if name not in offered:
        raise UserError(f"weights.transport.kind: {name}: the engine reads {', '.join(offered)}")
    return name


def build_transport(
    name: str,
    model: StageModel,
    grid: EngineGrid,
    owners: Sequence[int],
    dtype: torch.dtype,
    bucket_bytes: int,
    timeout_seconds: float,
    folder: Path | None = None,
    quantize: bool = False,
) -> Transport:
    """Plan how a model's tensors reach the engines, and return the transport that carries the plan out.
    Collective over all ranks.

    Args:
        name: in TRANSPORTS.
        owners: the rank that hands buckets to each replica.
        dtype: of the weights in the engines.
        bucket_bytes: a rank's memory stays within two of these, but for a fused parameter that is larger.
        folder: of `disk`.
        quantize: send linear layers and experts as blockwise float8; of layout `full`.
    """
    groups, hf = model.groups, model.hf
    kind = TRANSPORTS[name]
    sources = build_sources(model.rules.rules, hf, groups.layout, model.dims.padded_vocab_size)
    sources = list(quantize_sources(sources)) if quantize else sources
    plan = PublishPlan(
        sources, groups.layout, grid, hf.head_dim, dtype.itemsize, SLOTS * bucket_bytes // kind.buckets_alive
    )
    token, digest = secrets.token_hex(4), plan.hash
    gathered = all_gather_metadata((token, digest))
    assert len({digest for _, digest in gathered}) == 1, f"ranks planned differently: {gathered}"
    reader = (QuantizingReader if quantize else SliceReader)(model, plan, groups.rank)
    context = PublishContext(
        plan, reader, groups.rank, groups.world_size, tuple(owners), dtype, timeout_seconds, gathered[0][0]
    )
    if kind is DiskTransport:
        assert folder is not None
        return DiskTransport(context, folder)
    return kind(context)


def build_publisher(
    weights: WeightsConfig,
    engine_config: EngineConfig,
    actor: Actor | Reference,
    builder: MicroBatchBuilder,
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    run_dir: Path,
    timeout_seconds: float,
    recipe: str,
    max_new_tokens: int,
    counts: Counts = count_nothing,
) -> Publisher:
    """Build the publisher of this rank's engine. Collective over all ranks.

    Args:
        prompts: of the run, the same on all ranks: engine and actor are compared on some of them.
        run_dir: where `disk` writes, unless `weights` names another folder.
        timeout_seconds: of a collective.
        recipe: `precision.recipe`, which says how far engine and actor may differ.
        max_new_tokens: of a completion.

    Raises:
        UserError: the transport does not fit the machines or the engine.
    """
    model, groups = actor.model, actor.model.groups
    exporter = WeightExporter(model, weights.bucket_bytes)
    if engine.is_embedded:
        return LocalPublisher(exporter, cast(EmbeddedEngine, engine))
    server = cast(BucketEngine, engine)
    num_replicas = engine_config.server.num_replicas
    owners = [owner_of_replica(replica, groups.world_size, num_replicas) for replica in range(num_replicas)]
    replica = replica_of_rank(groups.rank, groups.world_size, num_replicas)
    host, are_started_here = urlsplit(server.address).hostname or "", not engine_config.server.addresses
    name = choose_transport(weights.transport.kind, server.transports, host, are_started_here)
    grid = EngineGrid(num_replicas, engine_config.server.tensor_parallel)
    quantize = engine_config.server.quantization != "none"

    def transport(grid: EngineGrid) -> Transport:
        folder = Path(getattr(weights.transport, "folder", None) or run_dir / "weights")
        timeout = float(timeout_seconds)
        # an engine that waits for slices in vain must answer before its silence counts as its death
        if name == "group":
            timeout = min(timeout, engine_config.server.request_timeout_seconds / GROUP_WAITS_IN_A_REQUEST)
        return build_transport(
            name, model, grid, owners, server.dtype, weights.bucket_bytes, timeout, folder, quantize
        )

    probe = None
    if weights.probe_tokens:
        probe = LogprobProbe(
            actor,
            builder,
            server,
            replica,
            server.is_owner,
            choose_prompts(prompts),
            min(weights.probe_tokens, max_new_tokens),  # they fit wherever a sequence does
            weights.probe_max_gap or PROBE_MAX_GAP.get(recipe, PROBE_MAX_GAP_ROUNDED),
        )
    sharded = (
        transport(replace(grid, layout="sharded")) if weights.layout != "full" and not quantize else None
    )
    return RemotePublisher(
        exporter,
        server,
        replica,
        transport(grid),
        Changes if weights.delta else Everything,
        probe,
        sharded,
        weights.layout == "sharded",
        counts,
    )
