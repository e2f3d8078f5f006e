"""The weights of a checkpoint as an HF folder as well: gathered while training waits, written by all ranks in
the background.

All ranks take part in gathering every tensor, and each keeps a copy of a share of them: a bucket's worth in
turn, so that none holds more than its part of the model, and a small model is one file of the first rank.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

import torch

from megagrpo.checkpoint.checksummed_file import FileContents
from megagrpo.checkpoint.staging import Staging
from megagrpo.weights.export import BUCKET_BYTES

FOLDER = "hf"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def collect_share(
    tensors: Iterable[tuple[str, torch.Tensor]],
    staging: Staging,
    rank: int,
    world_size: int,
    share_bytes: int = BUCKET_BYTES,
) -> dict[str, FileContents]:
    """Return this rank's files of the HF folder: name in the checkpoint -> contents. Collective over all
    ranks, as taking `tensors` is.

    Args:
        tensors: full HF tensors by name, the same on all ranks; each is valid until the next one is taken.
        staging: holds the copies, until the next save.
        share_bytes: what a rank takes before it is another one's turn.
    """
    mine: dict[str, torch.Tensor] = {}
    owners: dict[str, int] = {}
    total = owner = taken = 0
    for name, tensor in tensors:
        if taken >= share_bytes:
            owner, taken = (owner + 1) % world_size, 0
        owners[name] = owner
        size = tensor.numel() * tensor.element_size()
        total, taken = total + size, taken + size
        if owner == rank:
            buffer = staging.take((FOLDER, name), tuple(tensor.shape), tensor.dtype)
            mine[name] = buffer.copy_(tensor.detach(), non_blocking=True)
    count = max(owners.values()) + 1
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    files: dict[str, FileContents] = {f"{FOLDER}/{names[rank]}": as_safetensors(mine)} if mine else {}
    if rank == 0 and count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[owner] for name, owner in owners.items()},
        }
        files[f"{FOLDER}/model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return files


def as_safetensors(tensors: Mapping[str, torch.Tensor]) -> Sequence[memoryview | bytes]:
    """Return the parts of a safetensors file of contiguous host tensors, whose memory is not copied.

    Eight bytes with the length of the header, the header (JSON, filled up with spaces so that the data is
    aligned), the data.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [
        len(text).to_bytes(8, "little"),
        text,
        *(tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()),
    ]
