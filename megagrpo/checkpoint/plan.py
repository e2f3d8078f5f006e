"""Which shards this rank writes: found by Megatron's and torch's planners over all ranks, and kept while the
structure stays the same.

The planners describe every shard and gather the descriptions, while training waits: as long as a copy of half
a billion bytes takes. Where keys, shapes and staging buffers are those of the save before, what was found
then holds.
"""

import io
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megagrpo.parallel.groups import all_reduce_flag


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Plans as Megatron does, and hands the plan out instead of callbacks whose failure on one rank leaves
    the others waiting.
    """

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any
    ) -> tuple[FileSystemWriterAsync, Any]:
        return writer, planned[1]


@dataclass(frozen=True)
class ShardPlan:
    """What one rank writes in one save."""

    file_name: str  # empty: nothing
    tensors: Sequence[tuple[WriteItem, torch.Tensor]]  # in the staging buffers
    objects: Sequence[tuple[WriteItem, io.BytesIO]]
    common: bytes  # what all ranks hold alike, as Megatron's file of it
    metadata: Metadata | None  # describes the shards of all ranks; on the first rank
    strategy: Mapping[str, Any]  # as Megatron's file of it


class ShardPlanner:
    """Plans the saves of one run."""

    def __init__(self) -> None:
        self._found: tuple[str, Sequence, Sequence, Metadata | None] | None = None
        self._structure: list[Hashable] = []
        strategy = _PlanningStrategy("torch_dist", 1, thread_count=1)
        self._strategy = asdict(CheckpointingConfig(strategy.backend, strategy.version))

    def plan(self, state: dict[str, Any]) -> ShardPlan:
        """Return what this rank writes. Collective over all ranks.

        Where the structure is a new one it is checked over all ranks that every shard is written exactly
        once.

        Args:
            state: what `ShardCollector.collect` returned.
        """
        structure = list(_structure_of(state))
        is_new = all_reduce_flag(structure != self._structure)
        sharded, common = save_preprocess(state, validate_access_integrity=is_new)
        objects = {
            each.unique_key: each.data for each in nested_values(sharded) if isinstance(each, ShardedObject)
        }
        if is_new or self._found is None:
            self._found, self._structure = _find(sharded), structure
        file_name, tensors, planned, metadata = self._found
        # Megatron packs an object as a list of one; one that is None is as it was.
        fresh = [
            (item, old if objects[item.index.fqn] is None else _saved([objects[item.index.fqn]]))
            for item, old in planned
        ]
        return ShardPlan(file_name, tensors, fresh, _saved(common).getvalue(), metadata, self._strategy)


def _structure_of(state: dict[str, Any]) -> Iterator[Hashable]:
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor):
            place = shard.data.data_ptr() if is_main_replica(shard.replica_id) else None
            yield shard.key, shard.global_offset, shard.global_shape, shard.local_shape, shard.dtype, place
        elif isinstance(shard, ShardedObject):
            yield shard.unique_key, is_main_replica(shard.replica_id), shard.data is None


def _find(sharded: dict[str, Any]) -> tuple[str, Sequence, Sequence, Metadata | None]:
    writer, metadata = _PlanningStrategy("torch_dist", 1, thread_count=1).async_save(sharded, "")
    if metadata is not None:
        # for readers that compare plans; as large as all the rest
        metadata.__dict__.pop("all_local_plans", None)
    if not writer.write_buckets:
        return "", [], [], metadata
    ((_, file_name, (objects, tensors)),) = writer.write_buckets
    return file_name, tensors, objects, metadata


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
