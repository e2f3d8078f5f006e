"""Distributed checkpoints: every rank writes its shards; any layout can read them.

checkpoints/step_000010/          complete: the name appears by a rename, after everything is on disk
    __0_0.distcp ... .metadata    model and optimizer shards (Megatron-core dist_checkpointing, torch_dist)
    trainer_state.json            step, schedule, prompt position, weight version
checkpoints/step_000020.partial/  a save that was cut off; removed by the next save
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy, get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper

from megagrpo.checkpoint.state import TrainerState
from megagrpo.device.device import megatron_region
from megagrpo.models.megatron_files import copy_hf_files
from megagrpo.policy.actor import Actor

# The one optimizer sharding that reads back in another layout (0.16.1's default raises, dp_zero_gather_scatter does not reshard).
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "singleton_local_shards": False}


class CheckpointManager:
    """Saves, finds, loads and retires the checkpoints of one run folder."""

    def __init__(self, folder: Path, keep_last: int, hf_folder: Path):
        """`hf_folder`: its config and tokenizer are kept beside the shards, so that a checkpoint converts to HF by itself."""
        self.folder, self.keep_last, self.hf_folder = folder, keep_last, hf_folder

    def save(self, actor: Actor, state: TrainerState) -> Path:
        """Write a checkpoint and retire old ones. Collective over all ranks."""
        target = self.folder / f"step_{state.step:06d}"
        partial = target.with_name(target.name + ".partial")
        if dist.get_rank() == 0:
            for leftover in self.folder.glob("*.partial"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        dist.barrier()
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), actor.model.groups.dp_cp, True)
        with megatron_region():
            dist_checkpointing.save(_sharded_state(actor, is_loading=False), str(partial), strategy, content_metadata=dict(SHARDING))
        dist.barrier()
        if dist.get_rank() == 0:
            copy_hf_files(self.hf_folder, partial / "hf_files")
            state.save(partial / "trainer_state.json")
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            for old in self.complete()[: -self.keep_last]:
                shutil.rmtree(old)
        dist.barrier()
        return target

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(
            path for path in self.folder.iterdir() if re.fullmatch(r"step_\d+", path.name) and (path / "trainer_state.json").is_file()
        )

    def load(self, path: Path, actor: Actor) -> TrainerState:
        """Read model, optimizer and position, in any layout. Collective over all ranks."""
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), actor.model.groups.dp_cp)
        with megatron_region():
            state = dist_checkpointing.load(_sharded_state(actor, is_loading=True), str(path), strategy)
            actor.model.load_state_dict(state["model"])
            actor.optimizer.load_state_dict(state["optimizer"])
        return TrainerState.load(path / "trainer_state.json")


def _sharded_state(actor: Actor, is_loading: bool) -> dict[str, Any]:
    metadata = dict(SHARDING)  # a copy: Megatron adds this run's process groups to it
    model = actor.model.sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": actor.optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata)}
