"""Reads Megatron checkpoints without running code that somebody has planted in them.

Two kinds of pickle are in a checkpoint of the `torch_dist` format, and both are read by torch: `.metadata`, a
table of the shards, and the objects between the shards, with Megatron's common state. A pickle names
callables and has them called; here only those names are followed that such files hold.
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import CheckpointException, filesystem

from megagrpo.errors import UserError

_CHECKPOINT = "torch.distributed.checkpoint"
METADATA_NAMES = frozenset(
    {
        *(
            (f"{_CHECKPOINT}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
        *(
            (f"{_CHECKPOINT}.planner", name)
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    }
)
_CAUSE_CHARACTERS = 300


class MetadataUnpickler(pickle.Unpickler):
    """Follows METADATA_NAMES and the names of torch's dtypes, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names.

        Raises:
            pickle.UnpicklingError: no metadata of a checkpoint names it.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in METADATA_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint's does")


@contextmanager
def reading_checkpoint(folder: Path) -> Iterator[None]:
    """Let torch read a checkpoint's pickles by the rules above; for the main thread of a rank.

    torch's own restricted unpickler reads the objects: `weights_only`, also where its callers ask for
    everything.

    Raises:
        UserError: a file holds something else, or is damaged.
    """
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    unrestricted = filesystem.pickle
    # the reader's own name of the module; the writer beside it dumps
    filesystem.pickle = SimpleNamespace(load=_load_metadata, dump=unrestricted.dump)  # type: ignore[assignment]
    try:
        if (folder / ".metadata").is_file():
            with (folder / ".metadata").open("rb") as file:
                _load_metadata(file)  # torch answers a refusal with a traceback on the screen
        yield
    except (CheckpointException, pickle.UnpicklingError) as error:  # the first is no Exception
        raise UserError(f"{folder}: not read: {first_cause(error)}") from None
    finally:
        filesystem.pickle = unrestricted  # type: ignore[assignment]
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _load_metadata(file: IO[bytes]) -> Any:
    return MetadataUnpickler(file).load()


def first_cause(error: BaseException) -> str:
    """Return the first rank's error, without torch's advice to trust the file."""
    if isinstance(error, CheckpointException):
        error = next((each for each, _ in error.failures.values()), error)
    text = " ".join(str(error).split())
    if refused := re.search(r"GLOBAL (\S+)", text):  # in the middle of a page about trust
        text = f"an object names {refused[1]}, which no checkpoint's does"
    return f"{type(error).__name__}: {text[:_CAUSE_CHARACTERS]}"
