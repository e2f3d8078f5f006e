"""Tensors of an HF folder that are kept but not trained: layers for multi-token prediction, which lie behind
the model's own. Exports and conversions carry them from their source.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megagrpo.models.hf_config import load_config_json
from megagrpo.models.safetensors_file import safetensors_parts
from megagrpo.models.safetensors_folder import SafetensorsFolder

CARRIED_FILE = "carried.safetensors"  # in the `hf_files` of a converted Megatron checkpoint


def is_carried(name: str, raw: dict[str, Any]) -> bool:
    """Say whether a tensor is of a layer for multi-token prediction, by the fields of config.json."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    added = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0
    own = raw.get("num_hidden_layers", 0)
    return layer is not None and own <= int(layer[1]) < own + added


def carried_tensors(source: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of an HF folder's carried tensors, or of those beside a Megatron checkpoint."""
    folder = Path(source)
    single = folder / CARRIED_FILE
    if not single.is_file() and not any(folder.glob("model*.safetensors*")):
        return  # a folder that is gone too: the copy of its config reports that
    raw = load_config_json(source)
    files = SafetensorsFolder(folder, single if single.is_file() else None)
    for name in sorted(files.names()):
        if is_carried(name, raw):
            yield name, files.tensor_slice(name)[:]


def save_carried_tensors(source: str | Path, target: Path) -> None:
    """Write the carried tensors of the HF folder `source`, if it has any, into `target`."""
    if tensors := dict(carried_tensors(source)):
        with (target / CARRIED_FILE).open("wb") as file:
            for part in safetensors_parts(tensors):
                file.write(part)
