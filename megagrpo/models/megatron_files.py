"""A model as a Megatron-core distributed checkpoint, with the HF config and tokenizer beside it: the format
that `tools/` convert to and from.

FOLDER/__0_0.distcp ... .metadata   shards (torch_dist), readable in any layout
FOLDER/hf_files/                    config.json, tokenizer, generation config of the HF folder it came from
"""

import pickle
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from torch.distributed.checkpoint.api import CheckpointException

from megagrpo.device.device import megatron_region
from megagrpo.errors import UserError
from megagrpo.models.restricted_pickles import first_cause, reading_checkpoint
from megagrpo.models.stage import StageModel


def save_megatron_model(model: StageModel, folder: Path) -> None:
    """Write the model's shards into an empty folder. Collective over all ranks."""
    with megatron_region():
        state = {"model": model.sharded_state_dict()}
        dist_checkpointing.save(state, str(folder), get_default_save_sharded_strategy())


def load_megatron_model(model: StageModel, folder: Path) -> None:
    """Fill a stage model from a checkpoint, in any layout. Collective over all ranks. A run's checkpoint
    works; its optimizer is not read.

    Raises:
        UserError: the checkpoint is of another model, or damaged.
    """
    with megatron_region(), reading_checkpoint(folder):
        try:
            state = dist_checkpointing.load(
                {"model": model.sharded_state_dict(read_from=folder)}, str(folder)
            )
        except pickle.UnpicklingError:
            raise  # told by reading_checkpoint
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            # Megatron and torch.distributed.checkpoint raise a dozen types by what is wrong
            raise UserError(
                f"{folder}: not a checkpoint of this model, or damaged: {first_cause(error)}"
            ) from error
        model.load_state_dict(state["model"])
