"""The optimizer state of whole parameters, each on the one rank that writes it.

Megatron's `fully_reshardable` save gathers the state of ALL parameters on every data parallel rank, in new
buffers of several times the rank's shard. Here a parameter's pieces go from the ranks that hold them straight
to the rank that writes it, a few parameters at a time; where one rank holds a parameter's state alone,
nothing is copied at all. Its load reads the state of all parameters on every rank; here a rank reads the
parameters of which it holds a piece, in place where it holds all of one.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.checkpoint.staging import Staging

EXCHANGE_BYTES = 32 * 2**20  # in one exchange: bounds what is alive beside the staging buffers
STATES = ("param", "exp_avg", "exp_avg_sq")


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return which of the ranks that hold the same parameters writes each of them: the largest ones first,
    each to the rank with the fewest elements so far. Pure arithmetic, so that all of them decide alike.
    """
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def shard_overlap(
    start: int, stop: int, bucket_start: int, bucket_numel: int, rank: int, num_ranks: int
) -> tuple[int, int]:
    """Return the part [first, last) of a parameter whose optimizer state `rank` holds, counted from the
    parameter's start.

    Args:
        start: first element of the parameter in its buffer.
        stop: the element after its last.
        bucket_start: first element of its bucket in the buffer.
        bucket_numel: elements of the bucket, which the ranks share in equal consecutive parts.
        rank: the rank asked for.
        num_ranks: ranks that share the bucket.
    """
    part = bucket_numel // num_ranks
    first = max(start, bucket_start + rank * part)
    last = min(stop, bucket_start + (rank + 1) * part)
    return (first - start, max(first, last) - start)


@dataclass(frozen=True)
class OwnedParameter:
    """One parameter of a distributed optimizer."""

    parameter: torch.nn.Parameter
    start: int  # in its buffer
    stop: int
    bucket_start: int
    bucket_numel: int
    bucket: int
    buffer: int
    owner: int  # rank in the optimizer's data parallel group

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


class _OneByOne:
    """Stands in for a flat buffer of all parameters' states; Megatron slices it by parameter."""

    def __init__(self, tensors: dict[int, torch.Tensor]):
        self.tensors = tensors  # by the parameter's start

    def __getitem__(self, span: slice) -> torch.Tensor:
        return self.tensors[span.start]


class OwnedOptimizerState:
    """The parameters of one DistributedOptimizer, who writes each, and their state as a save needs it."""

    def __init__(self, optimizer: Any, name: str):
        """List the parameters, and who owns which.

        Args:
            optimizer: Megatron's DistributedOptimizer.
            name: tells its staging buffers from those of other optimizers.
        """
        self.optimizer, self.name = optimizer, name
        self.group: dist.ProcessGroup = optimizer.data_parallel_group
        self.parameters = self._list_parameters()

    def _list_parameters(self) -> list[OwnedParameter]:
        found = []
        for number, buffer in enumerate(self.optimizer.buffers):
            for parameter, (start, stop, bucket_id) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_id]
                found.append(
                    (parameter, start, stop, bucket.offset, bucket.grad_data.numel(), bucket_id, number)
                )
        owners = assign_owners([stop - start for _, start, stop, *_ in found], self.group.size())
        return [OwnedParameter(*fields, owner) for fields, owner in zip(found, owners, strict=True)]

    def is_owner(self, parameter: OwnedParameter) -> bool:
        """Say whether this rank writes it."""
        return parameter.owner == self.group.rank()

    @contextlib.contextmanager
    def in_place_of_gather(self, staging: Staging) -> Iterator[None]:
        """Make `optimizer.sharded_state_dict` take the state from here. Collective over the optimizer's
        data parallel group.
        """
        with self._providing(lambda: self._collect(staging)):
            yield

    @contextlib.contextmanager
    def in_place_of_zeros(self) -> Iterator[None]:
        """Make `optimizer.sharded_state_dict` of a load read into the optimizer's own tensors, or into whole
        parameters of which it holds a piece; those of which it holds none become placeholders, see
        `drop_unneeded`.
        """
        with self._providing(lambda: self._by_buffer(self._target)):
            yield

    @contextlib.contextmanager
    def _providing(self, states: Callable[[], dict[int, Any]]) -> Iterator[None]:
        self.optimizer.get_parameter_state_dp_zero = lambda **_: states()
        try:
            yield
        finally:
            del self.optimizer.get_parameter_state_dp_zero

    def drop_unneeded(self, sharded: dict[str, Any]) -> None:
        """Take the parameters of which this rank holds nothing out of a load's state dict; of the others
        the first is the main replica.
        """
        for index, parameter in enumerate(self.parameters):
            holders = [rank for rank in range(self.group.size()) if self._holds(parameter, rank)]
            if self.group.rank() not in holders:
                del sharded["param_state"][index]
                continue
            for shard in sharded["param_state"][index].values():
                shard.replica_id = (*shard.replica_id[:-1], self.group.rank() - holders[0])

    def _holds(self, parameter: OwnedParameter, rank: int) -> bool:
        first, last = self._overlap(parameter, rank)
        return last > first

    def _target(self, parameter: OwnedParameter, state: str) -> torch.Tensor:
        piece = self._local_piece(parameter, state)
        if piece is None:
            return torch.empty(1).expand(parameter.numel)
        # with the weight, which is read too
        shares_memory = state == "param" and parameter.parameter.dtype == torch.float32
        return torch.empty(parameter.numel) if shares_memory or self.group.size() > 1 else piece

    def _collect(self, staging: Staging) -> dict[int, Any]:
        found: dict[tuple[int, int, str], torch.Tensor] = {}  # by buffer, start, state
        for state in STATES:
            pending: list[OwnedParameter] = []
            for parameter in self.parameters:
                local = self._whole_state(parameter, state)
                if local is None:
                    pending.append(parameter)
                else:
                    found[parameter.buffer, parameter.start, state] = local
            for batch in _batches(pending):
                for parameter, whole in zip(batch, self._exchange(batch, state, staging), strict=True):
                    found[parameter.buffer, parameter.start, state] = whole
        return self._by_buffer(lambda parameter, state: found[parameter.buffer, parameter.start, state])

    def _by_buffer(self, tensor_of: Callable[[OwnedParameter, str], torch.Tensor]) -> dict[int, Any]:
        """Return what `get_parameter_state_dp_zero` does, with one tensor for each parameter and state."""
        tensors: dict[tuple[int, str], dict[int, torch.Tensor]] = {
            (number, state): {} for number in range(len(self.optimizer.buffers)) for state in STATES
        }
        for parameter in self.parameters:
            for state in STATES:
                tensors[parameter.buffer, state][parameter.start] = tensor_of(parameter, state)
        return {
            number: {
                dtype: {state: _OneByOne(tensors[number, state]) for state in STATES} for dtype in ranges
            }
            for number, ranges in enumerate(self.optimizer.gbuf_ranges)
        }

    def _whole_state(self, parameter: OwnedParameter, state: str) -> torch.Tensor | None:
        """Return the state where this rank holds all of it; None: it must be exchanged."""
        if state == "param" and parameter.parameter.dtype == torch.float32:
            # float32 parameters are their own main parameters
            return parameter.parameter.detach().reshape(-1)
        if self.group.size() == 1:
            return (
                self.optimizer._get_main_param_and_optimizer_states(parameter.parameter)[state]
                .detach()
                .reshape(-1)
            )
        return None

    def _local_piece(self, parameter: OwnedParameter, state: str) -> torch.Tensor | None:
        ranges = next(iter(self.optimizer.gbuf_ranges[parameter.buffer].values()))[parameter.bucket][
            "param_map"
        ]
        if parameter.parameter not in ranges:
            return None
        return (
            self.optimizer._get_main_param_and_optimizer_states(parameter.parameter)[state]
            .detach()
            .reshape(-1)
        )

    def _overlap(self, parameter: OwnedParameter, rank: int) -> tuple[int, int]:
        return shard_overlap(
            parameter.start,
            parameter.stop,
            parameter.bucket_start,
            parameter.bucket_numel,
            rank,
            self.group.size(),
        )

    def _exchange(self, batch: list[OwnedParameter], state: str, staging: Staging) -> list[torch.Tensor]:
        """Bring the pieces of `batch` to their owners; a parameter of another owner becomes a placeholder
        without memory.
        """
        ranks, me = range(self.group.size()), self.group.rank()
        pieces: list[list[torch.Tensor]] = [[] for _ in ranks]
        for parameter in batch:
            if (piece := self._local_piece(parameter, state)) is not None:
                pieces[parameter.owner].append(piece)
        device = batch[0].parameter.device
        # they may have left the device until the next update
        sent = [torch.cat(parts).to(device) if parts else torch.empty(0, device=device) for parts in pieces]
        owned = [parameter for parameter in batch if parameter.owner == me]
        sizes = [
            sum(last - first for first, last in (self._overlap(parameter, rank) for parameter in owned))
            for rank in ranks
        ]
        received = torch.empty(sum(sizes), device=device)
        dist.all_to_all_single(
            received, torch.cat(sent), sizes, [part.numel() for part in sent], group=self.group
        )
        whole = {
            parameter.start: staging.take(
                (self.name, parameter.buffer, parameter.start, state), (parameter.numel,), torch.float32
            )
            for parameter in owned
        }
        offset = 0
        for rank in ranks:
            for parameter in owned:
                first, last = self._overlap(parameter, rank)
                whole[parameter.start][first:last].copy_(
                    received[offset : offset + last - first], non_blocking=True
                )
                offset += last - first
        return [whole.get(parameter.start, torch.empty(1).expand(parameter.numel)) for parameter in batch]


def _batches(parameters: list[OwnedParameter]) -> Iterator[list[OwnedParameter]]:
    batch: list[OwnedParameter] = []
    for parameter in parameters:
        if batch and sum(each.numel for each in batch) + parameter.numel > EXCHANGE_BYTES // 4:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch
