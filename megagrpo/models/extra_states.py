"""The state that Transformer Engine's modules keep beside their parameters (`_extra_state`), in checkpoints.

Every module of it names one, but only delayed FP8 scaling puts something in: the history of largest values.
Empty ones are not saved, and those that a checkpoint does not hold are not asked for. So the layers of one
spec read what the layers of the other have written.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

NAME = "_extra_state"


def drop_empty_extra_states(state: dict[str, Any]) -> None:
    """Take out of a module's sharded state what a save need not hold, in place."""
    _drop(state, lambda shard: _is_empty(shard.data))


def drop_absent_extra_states(state: dict[str, Any], folder: Path, prefix: str = "") -> None:
    """Take out of a module's sharded state what the checkpoint in `folder` does not hold, in place.

    Args:
        prefix: of the module's names in the checkpoint.
    """
    held = load_sharded_metadata(str(folder)) if _extra_states(state) else {}
    _drop(state, lambda shard: prefix + shard.unique_key not in held)


def load_state(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load a state dict that may lack extra states; anything else that is missing or unknown is an error."""
    outcome = module.load_state_dict(state, strict=False)
    wrong = [name for names in outcome for name in names if NAME not in name.rsplit(".", 1)[-1]]
    if wrong:
        raise RuntimeError(f"not the state of this module: {', '.join(sorted(wrong))}")


def _extra_states(state: dict[str, Any]) -> list[str]:
    return [
        name
        for name, shard in state.items()
        if isinstance(shard, ShardedObject) and NAME in name.rsplit(".", 1)[-1]
    ]


def _drop(state: dict[str, Any], is_unwanted: Any) -> None:
    for name in _extra_states(state):
        if is_unwanted(state[name]):
            del state[name]


def _is_empty(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() == 0
    return value is None or (hasattr(value, "getbuffer") and value.getbuffer().nbytes == 0)
