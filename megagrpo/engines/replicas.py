"""Which rank starts which server, which server a rank generates through, and the engine that a rank gets
for it.
"""

import socket
from pathlib import Path
from typing import Any

import torch

from megagrpo.config.engine_sections import EngineConfig
from megagrpo.engines import ENGINES, Engine
from megagrpo.errors import UserError
from megagrpo.parallel.groups import ParallelGroups, all_gather_metadata


def replica_of_rank(rank: int, world_size: int, num_replicas: int) -> int:
    """Return the replica that `rank` generates through: neighbouring ranks share one, and the shares
    differ by one rank at most.
    """
    return rank * num_replicas // world_size


def owner_of_replica(replica: int, world_size: int, num_replicas: int) -> int:
    """Return the rank that starts, updates and closes `replica`: the first one that generates through it."""
    return -(-replica * world_size // num_replicas)


def replicas_of_ranks(config: EngineConfig, world_size: int) -> list[int]:
    """Return the replica that each rank generates through; an embedded engine is every rank's own."""
    if ENGINES.find(config.name).is_embedded:
        return list(range(world_size))
    return [replica_of_rank(rank, world_size, config.server.num_replicas) for rank in range(world_size)]


def engine_log(config: EngineConfig, run_dir: Path, replica: int) -> Path | None:
    """Return the log of a server that the run starts; None where it starts none."""
    if ENGINES.find(config.name).is_embedded or config.server.addresses:
        return None
    name = config.name.rpartition(":")[2]  # NAME where it is FILE.py:NAME
    return run_dir / "engines" / f"{name}_{replica}.log"


def build_rollout_engine(
    config: EngineConfig,
    run_dir: Path,
    longest_sequence_tokens: int,
    groups: ParallelGroups,
    hf_folder: str | Path,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    load_weights: bool = False,
) -> Engine:
    """Return this rank's engine: embedded, or its view of the replica that it shares with its neighbours.
    Collective over all ranks.

    Owners start their servers at the same time, with logs in `run_dir`/engines/NAME_REPLICA.log; the
    others learn the addresses. A server has room for `longest_sequence_tokens`, unless `config` says more.
    With `load_weights` an engine serves from the start: the folder's weights, or what a given server holds.

    Raises:
        UserError: on all ranks alike: a server doesn't start, isn't there, has another model than the one
            that is wanted, or can't be reached from a rank's host.
    """
    factory = ENGINES.find(config.name)
    options = {"tokenizer": tokenizer, "device": device, "dtype": dtype}
    if load_weights:
        options["load_weights"] = True
    if factory.is_embedded:
        return factory(hf_folder, config, **options)
    config = _with_context(config, longest_sequence_tokens)
    num_replicas = config.server.num_replicas
    replica = replica_of_rank(groups.rank, groups.world_size, num_replicas)
    owner = owner_of_replica(replica, groups.world_size, num_replicas)
    log_file = engine_log(config, run_dir, replica)
    given = config.server.addresses[replica] if config.server.addresses else None
    engine, address, problem = None, None, None
    if groups.rank == owner:
        try:
            engine = factory(hf_folder, config, **options, address=given, log_file=log_file)
            address = engine.address
            engine.check_model()
        except UserError as error:
            problem = str(error)
    found = all_gather_metadata((address, socket.gethostname(), problem))
    problems = sorted({text for *_, text in found if text})
    if given is None:
        problems += _unreachable(groups, num_replicas, [host for _, host, _ in found])
    if problems:
        if engine is not None:
            engine.close()
        raise UserError("\n".join(problems))
    return engine or factory(hf_folder, config, **options, address=found[owner][0], is_owner=False)


def _with_context(config: EngineConfig, longest_sequence_tokens: int) -> Any:
    """Return the section with `max_model_len` set to the run's longest sequence: one of all
    the positions of a model (Llama 3.1: 17 GB of keys and values) may not fit beside the trainer.
    """
    server = config.server
    if server.max_model_len is not None:
        return config
    server = server.model_copy(update={"max_model_len": longest_sequence_tokens})
    return config.model_copy(update={"server": server})


def _unreachable(groups: ParallelGroups, num_replicas: int, hosts: list[str]) -> list[str]:
    """Return one line if a rank is not on the host of its replica, whose server listens to that host
    alone.
    """
    for rank in range(groups.world_size):
        owner = owner_of_replica(
            replica_of_rank(rank, groups.world_size, num_replicas), groups.world_size, num_replicas
        )
        if hosts[rank] != hosts[owner]:
            return [
                f"engine.server.replicas: {num_replicas}: rank {rank} on {hosts[rank]} would generate on "
                f"{hosts[owner]}; "
                f"take a multiple of the {len(set(hosts))} hosts, or servers of your own "
                "(engine.server.addresses)"
            ]
    return []
