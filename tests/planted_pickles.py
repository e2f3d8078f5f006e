"""Plants pickles in checkpoints: each leaves a file behind where it is run."""

import io
import os
import pickle
from pathlib import Path

import torch


class Payload:
    """Its pickle makes a file."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def plant_in_metadata(checkpoint: Path, trace: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(trace)))


def plant_in_common_state(checkpoint: Path, trace: Path) -> None:
    torch.save(Payload(trace), checkpoint / "common.pt")


def plant_in_shard(checkpoint: Path, trace: Path) -> None:
    """Put the payload in the place of every object between the shards, or else of every tensor."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    objects = {
        name
        for name, each in metadata.state_dict_metadata.items()
        if type(each).__name__ == "BytesStorageMetadata"
    }
    contents = io.BytesIO()
    torch.save(Payload(trace), contents)
    places = [place for index, place in metadata.storage_data.items() if index.fqn in objects or not objects]
    for place in places:
        with (checkpoint / place.relative_path).open("ab") as shard:
            place.offset, place.length = shard.tell(), len(contents.getvalue())
            shard.write(contents.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_in_carried(checkpoint: Path, trace: Path) -> None:
    for path in (checkpoint / "carried").iterdir():
        path.write_bytes(pickle.dumps(Payload(trace)))


KINDS = {
    ".metadata": plant_in_metadata,
    "common.pt": plant_in_common_state,
    "a shard": plant_in_shard,
    "carried/": plant_in_carried,
}
