"""Writes an HF folder from a stream of full tensors, and the files beside the weights: config, tokenizer,
generation config.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

from megagrpo.config.run_sections import ExportDtype
from megagrpo.errors import UserError
from megagrpo.models.carried_tensors import carried_tensors
from megagrpo.models.hf_config import load_config_json
from megagrpo.models.safetensors_file import safetensors_index, safetensors_names, safetensors_parts

# A router's bias: to round it would swap experts.
KEPT_IN_FLOAT32 = r".*\.e_score_correction_bias"
MAX_SHARD_BYTES = 5 * 2**30  # size of one safetensors file of an export, as on the Hugging Face hub
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
)
MODEL_PATTERNS = ("config.json", "generation_config.json")


def export_dtype(choice: ExportDtype, source: str | Path) -> torch.dtype | None:
    """Return the dtype of an export's tensors: the one chosen, or that which the config.json of `source`
    names; None, that of the weights, where it names none.

    Raises:
        UserError: the config names no floating-point dtype.
    """
    raw = load_config_json(source)
    name = choice if choice != "source" else raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"{source}/config.json: dtype: {name!r}: not a dtype of weights (float32, bfloat16, float16)"
        )
    return dtype


def written_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is written: `dtype`, or float32 where models keep that."""
    return torch.float32 if re.fullmatch(KEPT_IN_FLOAT32, name) else dtype


def copy_hf_files(
    source: str | Path,
    target: str | Path,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Copy config, generation config and tokenizer of an HF folder (not its weights) into a folder.

    Args:
        tokenizer: the folder that the tokenizer is taken from; None: `source`.
        dtype: what the config says that the weights are; None: what it says already.

    Raises:
        FileNotFoundError: a folder has no config.json, or is gone: nothing could load the weights.
    """
    for needed in (Path(source) / "config.json", Path(tokenizer or source)):
        if not needed.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(needed))
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    for folder, patterns in ((source, MODEL_PATTERNS), (tokenizer or source, TOKENIZER_PATTERNS)):
        for pattern in patterns:
            for path in Path(folder).glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, target / path.name)
    if dtype is not None:
        set_config_dtype(target, dtype)


def set_config_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Make the config.json of a folder name the dtype that its tensors have."""
    raw = load_config_json(folder)
    name = str(dtype).removeprefix("torch.")
    for key in [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]:
        raw[key] = name
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def staging_folder(target: Path) -> Path:
    """Return where an HF folder is written before it appears as `target`."""
    return target.with_name(target.name + ".partial")


def write_hf_folder(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write full HF tensors as safetensors files of at most 5 GiB, with config and tokenizer beside them.

    What the source holds of layers for multi-token prediction is written too. The folder appears complete
    or not at all: it is written beside its place, as `staging_folder` says, and
    moved there by a rename.

    Args:
        tensors: name and full tensor; valid until the next one is taken.
        source: the HF folder that config and tokenizer come from.
        dtype: of the files, named in the config too; None: that of the first tensor. What the family keeps in
            float32 stays so.
        tokenizer: see `copy_hf_files`.
    """
    target = Path(target)
    staging = staging_folder(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    files: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = pending_bytes = 0

    def flush() -> None:
        with (staging / f"part-{len(files)}.safetensors").open("wb") as file:
            for part in safetensors_parts(pending):
                file.write(part)
        files.append(list(pending))
        pending.clear()

    for name, tensor in chain(tensors, carried_tensors(source)):
        dtype = dtype or tensor.dtype
        kept = tensor.detach().to("cpu", written_dtype(name, dtype), copy=True).contiguous()
        if pending and pending_bytes + kept.nbytes > MAX_SHARD_BYTES:
            flush()
            pending_bytes = 0
        pending[name] = kept
        pending_bytes += kept.nbytes
        total += kept.nbytes
    flush()
    names = safetensors_names(len(files))
    for number, name in enumerate(names):
        (staging / f"part-{number}.safetensors").rename(staging / name)
    if len(files) > 1:
        file_of = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
        (staging / "model.safetensors.index.json").write_bytes(safetensors_index(file_of, total))
    copy_hf_files(source, staging, tokenizer, dtype)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
