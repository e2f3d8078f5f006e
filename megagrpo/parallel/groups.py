"""The process groups of a rank, and the few collectives that the trainer itself needs."""

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.device import device as device_module
from megagrpo.parallel import plain_data
from megagrpo.parallel.layout import ParallelLayout

_starts = itertools.count()
_PATIENCE = timedelta(days=7)  # no phase may take longer (watchdog.limit_seconds)


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this rank belongs to, and its place in each."""

    layout: ParallelLayout
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup  # ranks that hold the same parameters: gradients are summed over it
    ep: dist.ProcessGroup  # ranks that share the experts of a layer out
    etp: dist.ProcessGroup  # ranks that split each expert
    experts: dist.ProcessGroup  # ep x etp: together they hold all experts of a layer; etp is the faster axis
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    rank: int
    world_size: int

    @property
    def is_first_stage(self) -> bool:
        """Say whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Say whether this rank holds the output layer, and so the losses."""
        return self.pp_rank == self.pp.size() - 1

    @property
    def reports_losses(self) -> bool:
        """Say whether this rank's losses and metrics enter a sum over all ranks: one tp rank of each
        context parallel part.
        """
        return self.is_last_stage and self.tp_rank == 0


def build_groups(layout: ParallelLayout, timeout_seconds: int, with_gloo: bool = True) -> ParallelGroups:
    """Start torch.distributed (where the caller has not) and Megatron's groups. Collective over all ranks.

    Args:
        layout: sizes of the axes; it must divide the world.
        timeout_seconds: a collective that waits longer than this raises on the waiting ranks.
        with_gloo: also make Megatron's groups for tensors on the host.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        _start_process_group(timedelta(seconds=timeout_seconds))
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=max(1, timeout_seconds // 60),
        create_gloo_process_groups=with_gloo,
    )
    # Megatron forks this tracker for dropout and recompute; nothing in a run draws from it, so its seed is
    # not a setting.
    model_parallel_cuda_manual_seed(0)
    return ParallelGroups(
        layout=layout,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        experts=parallel_state.get_expert_tensor_and_model_parallel_group(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )


def _start_process_group(timeout: timedelta) -> None:
    """Join the ranks that torchrun started; a single process needs no launcher and no port.

    Each start of a process, and each restart of the ranks by torchrun, uses keys of its own in the launcher's
    store, which outlives them: those of a group that was destroyed, or of ranks that died, name dead sockets.
    """
    start = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/start_{next(_starts)}"
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    store.set_timeout(timeout)
    dist.init_process_group(
        device_module.backend(),
        timeout=timeout,
        store=dist.PrefixStore(start, store),
        rank=rank,
        world_size=world_size,
        device_id=device_module.process_group_device(),
    )


def destroy_groups() -> None:
    """Take Megatron's groups and torch.distributed down. A gloo group holds threads until nothing refers to
    it any more.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name in ("_GROUP_WITH_CP", "_GROUP_WITH_CP_GLOO"):  # forgotten there
        setattr(parallel_state, f"_INTRA_PARTIAL_DATA_PARALLEL{name}", None)
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather_metadata(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value`, by rank. Collective over `group`, all ranks by default; for small values,
    never for token tensors.

    Args:
        value: what `plain_data` takes: nothing that a rank is told can run there.

    Raises:
        TypeError: on all ranks, where a value is no plain one.
    """
    try:
        data = b"+" + plain_data.encode(value)
    except TypeError as error:  # the others wait
        data = f"-rank {dist.get_rank()}: {error}".encode()
    gathered = _all_gather_bytes(data, group)
    if refused := next((told for told in gathered if told[:1] != b"+"), None):
        raise TypeError(refused[1:].decode())
    return [plain_data.decode(told[1:]) for told in gathered]


def _all_gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Collective over `group`: lengths, then the bytes, padded to the longest."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, own, group=group)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def wait_for_all_ranks() -> None:
    """Wait until every rank is here, for longer than collectives may take. Collective over all ranks.

    For work whose length no rank can bound, as rollouts with long tails: the collective that follows then
    waits for messages alone, and its time-out stays one that finds ranks that hang. A rank that dies breaks
    the wait at once; one that stalls is the watchdog's.
    """
    options = dist.AllreduceOptions()
    options.timeout = _PATIENCE
    world = dist.group.WORLD
    assert world is not None
    world.allreduce([torch.zeros(1)], options).wait()


def all_reduce_flag(flag: bool) -> bool:
    """Say whether `flag` is set on any rank. Collective over all ranks."""
    tensor = torch.tensor(int(flag))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor)
