"""The weights of a checkpoint as an HF folder as well: gathered while training waits, written by all ranks in
the background.

All ranks take part in gathering every tensor, and each keeps a copy of a share of them: a bucket's worth in
turn, so that none holds more than its part of the model, and a small model is one file of the first rank.
"""

from collections.abc import Iterable

import torch

from megagrpo.checkpoint.manifest import FileContents
from megagrpo.checkpoint.staging import Staging
from megagrpo.models.hf_export import written_dtype
from megagrpo.models.safetensors_file import safetensors_index, safetensors_names, safetensors_parts
from megagrpo.weights.export import BUCKET_BYTES

FOLDER = "hf"


def collect_share(
    tensors: Iterable[tuple[str, torch.Tensor]],
    staging: Staging,
    rank: int,
    world_size: int,
    share_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> dict[str, FileContents]:
    """Return this rank's files of the HF folder: name in the checkpoint -> contents. Collective over all
    ranks, as taking `tensors` is.

    Args:
        tensors: full HF tensors by name, the same on all ranks; each is valid until the next one is taken.
        staging: holds the copies, until the next save.
        share_bytes: what a rank takes before it is another one's turn.
        dtype: of the files; None: that of the tensors.
    """
    mine: dict[str, torch.Tensor] = {}
    owners: dict[str, int] = {}
    total = owner = taken = 0
    for name, tensor in tensors:
        if taken >= share_bytes:
            owner, taken = (owner + 1) % world_size, 0
        owners[name] = owner
        kept = written_dtype(name, dtype or tensor.dtype)
        size = tensor.numel() * kept.itemsize
        total, taken = total + size, taken + size
        if owner == rank:
            buffer = staging.take((FOLDER, name), tuple(tensor.shape), kept)
            mine[name] = buffer.copy_(tensor.detach(), non_blocking=True)
    names = safetensors_names(max(owners.values()) + 1)
    files: dict[str, FileContents] = {f"{FOLDER}/{names[rank]}": safetensors_parts(mine)} if mine else {}
    if rank == 0 and len(names) > 1:
        file_of = {name: names[owner] for name, owner in owners.items()}
        files[f"{FOLDER}/model.safetensors.index.json"] = safetensors_index(file_of, total)
    return files
