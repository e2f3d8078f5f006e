"""The sharded state of an actor, in the form of Megatron-core's dist_checkpointing: collected for a save, and
read back.

collect   model and optimizer as ShardedTensors with global names; of everything that several ranks hold one
          rank is the owner, whose part is copied to host memory (`staging.py`); the others write nothing
load      any layout reads what any other has written
"""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from megagrpo.checkpoint.optimizer_state import OwnedOptimizerState
from megagrpo.checkpoint.staging import Staging
from megagrpo.device.device import megatron_region
from megagrpo.models.restricted_pickles import reading_checkpoint
from megagrpo.models.stage import StageModel
from megagrpo.policy.actor import Actor

# The one optimizer sharding that reads back in another layout (0.16.1's default raises,
# dp_zero_gather_scatter does not reshard).
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
REFERENCE = "reference"  # prefix of the reference model's tensors, where it is saved


class ShardCollector:
    """Collects this rank's shards of every save in the same host buffers."""

    def __init__(self, actor: Actor, reference: StageModel | None = None):
        """`reference`: the frozen model, where its weights are to be in every checkpoint."""
        self.actor, self.reference = actor, reference
        self.staging = Staging()
        self.optimizers = owned_optimizers(actor)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank writes: each owned parameter and its three float32 optimizer tensors."""
        owned = [
            each for optimizer in self.optimizers for each in optimizer.parameters if optimizer.is_owner(each)
        ]
        reference = (
            self.reference.chunks
            if self.reference is not None and self.actor.model.groups.dp_cp.rank() == 0
            else ()
        )
        frozen = sum(each.numel() * each.element_size() for chunk in reference for each in chunk.parameters())
        return frozen + sum(each.numel * (each.parameter.element_size() + 12) for each in owned)

    def collect(self) -> dict[str, Any]:
        """Return the sharded state dict with this rank's part copied to host memory. Collective over data
        parallel ranks.

        The copies are valid until the next call.
        """
        self.staging.start()
        with megatron_region(), torch.no_grad(), _quick_garbage_collection(), contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.in_place_of_gather(self.staging))
            metadata = dict(SHARDING)  # a copy: Megatron adds this run's process groups to it
            model = self.actor.model.sharded_state_dict(metadata=metadata)
            self._set_owners(model)
            optimizer_state = self.actor.optimizer.sharded_state_dict(
                {"model": model}, is_loading=False, metadata=metadata
            )
            state = {"model": model, "optimizer": optimizer_state}
            if self.reference is not None:
                state[REFERENCE] = _reference_state(self.reference)
            apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
                shard.data = self.staging.hold((shard.key, shard.global_offset), shard.data.detach())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies run on the current stream
        return state

    def _set_owners(self, model: dict[str, Any]) -> None:
        """Make each parameter's owner the main replica of it; the optimizer's tensors take the numbers
        over from the model's.
        """
        owned = {
            each.parameter: optimizer.is_owner(each)
            for optimizer in self.optimizers
            for each in optimizer.parameters
        }
        for shard in nested_values(model):
            if isinstance(shard.data, torch.nn.Parameter) and shard.data in owned:
                *others, replica = shard.replica_id
                shard.replica_id = (*others, 0 if owned[shard.data] else replica + 1)


def owned_optimizers(actor: Actor) -> list[OwnedOptimizerState]:
    """Return the view of each of the actor's distributed optimizers, in Megatron's order."""
    return [
        OwnedOptimizerState(each, f"optimizer {number}")
        for number, each in enumerate(actor.optimizer.chained_optimizers)
    ]


@contextlib.contextmanager
def _quick_garbage_collection() -> Iterator[None]:
    """Hide the objects that are alive from the collector: Megatron's optimizer collects garbage in each save,
    which looks at all of them.

    That takes as long as the copy of a billion bytes, while training waits.
    """
    if gc.get_freeze_count():  # the user's own freeze must last
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def load_shards(folder: Path, actor: Actor, reference: StageModel | None = None) -> None:
    """Read model and optimizer, in any layout. Collective over all ranks.

    Args:
        folder: a complete checkpoint.
        actor: takes the weights and the optimizer state in.
        reference: takes the reference weights in, where the checkpoint holds them.
    """
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)), actor.model.groups.dp_cp
    )
    metadata = dict(SHARDING)
    optimizers = owned_optimizers(actor)
    with megatron_region(), reading_checkpoint(folder), contextlib.ExitStack() as stack:
        for each in optimizers:
            stack.enter_context(each.in_place_of_zeros())
        model = actor.model.sharded_state_dict(metadata=metadata, read_from=folder)
        optimizer = actor.optimizer.sharded_state_dict({"model": model}, is_loading=True, metadata=metadata)
        for number, each in enumerate(optimizers):
            each.drop_unneeded(optimizer if len(optimizers) == 1 else optimizer[number])
        state = {"model": model, "optimizer": optimizer}
        if reference is not None:
            state[REFERENCE] = _reference_state(reference, folder)
        state = dist_checkpointing.load(state, str(folder), strategy)
        actor.model.load_state_dict(state["model"])
        actor.optimizer.load_state_dict(state["optimizer"])
        if reference is not None:
            reference.load_state_dict(state[REFERENCE])


def _reference_state(reference: StageModel, read_from: Path | None = None) -> dict[str, Any]:
    return reference.sharded_state_dict(dict(SHARDING), read_from, prefix=f"{REFERENCE}.")
