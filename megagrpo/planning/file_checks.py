"""Checks of the files that a configuration names. They read the disk, no more than a `config.json`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megagrpo.config.model_folder import (
    change_config,
    hf_folder_of,
    is_megatron_checkpoint,
    problems_of_changes,
)
from megagrpo.config.rollout_sections import DataConfig, EvaluationConfig, RewardsConfig
from megagrpo.config.training_sections import ModelConfig
from megagrpo.errors import UserError
from megagrpo.registry import is_code_place
from megagrpo.rollout.data_sources import find_source, looks_like_hub_name

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def read_hf_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the model's `config.json` as the run reads it, or None where there is none that can be read
    (`check_files` says why).
    """
    raw = _read_raw(model.path)
    return None if raw is None else change_config(raw, model)


def _read_raw(path: str) -> dict[str, Any] | None:
    try:
        content = json.loads((hf_folder_of(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def check_files(
    model: ModelConfig, data: DataConfig, evaluation: EvaluationConfig, rewards: RewardsConfig
) -> Iterator[str]:
    """Yield one line for each file that is missing or cannot be what the field says."""
    yield from _check_model(model)
    yield from _check_tokenizer(model)
    for place, part in data.parts:
        yield from _check_source(place, part.source)
    for position, held_out in enumerate(evaluation.sets):
        yield from _check_source(f"evaluation.sets.{position}.source", held_out.source)
    for position, reward in enumerate(rewards.functions):
        if is_code_place(reward.name):
            yield from _check_source(f"rewards.functions.{position}.name", reward.name)


def _check_model(model: ModelConfig) -> Iterator[str]:
    path, folder = model.path, Path(model.path)
    if not folder.is_dir():
        hint = (
            f"; a name of the Hugging Face hub is not read: hf download {path} --local-dir "
            f"models/{folder.name}, then model.path=models/{folder.name}"
            if looks_like_hub_name(path)
            else ""
        )
        yield f"model.path: {path}: no such folder{hint}"
    elif not (hf_folder_of(folder) / "config.json").is_file():
        yield (
            f"model.path: {path}: no config.json in it; an HF folder has config.json, safetensors and a "
            "tokenizer"
        )
    elif (raw := _read_raw(path)) is None:
        yield f"model.path: {path}/config.json: not a JSON object"
    else:
        yield from problems_of_changes(raw, model)
        if not is_megatron_checkpoint(folder):
            yield from _check_weights(folder)


def _check_weights(folder: Path) -> Iterator[str]:
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        yield (
            f"model.path: {folder}: its weights are in {pickled[0]}, a pickle, and safetensors are read; "
            "save it again: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    else:
        yield f"model.path: {folder}: no weights (*.safetensors) in it"


def _check_tokenizer(model: ModelConfig) -> Iterator[str]:
    folder = Path(model.tokenizer or hf_folder_of(model.path))
    if model.tokenizer is not None and not folder.is_dir():
        yield f"model.tokenizer: {folder}: no such folder"
    elif (folder / "config.json").is_file() and not any(
        (folder / name).is_file() for name in TOKENIZER_FILES
    ):
        field = "model.path" if model.tokenizer is None else "model.tokenizer"
        yield f"{field}: {folder}: no tokenizer in it (none of {', '.join(TOKENIZER_FILES)})"


def _check_source(place: str, source: str) -> Iterator[str]:
    if is_code_place(source):
        location = source.rpartition(":")[0]
        if location.endswith(".py") and not Path(location).is_file():
            yield f"{place}: {location}: no such file"
        return
    try:
        find_source(source)
    except UserError as error:
        yield f"{place}: {source}: {error}"
        return
    if Path(source).stat().st_size == 0:
        yield f"{place}: {source}: the file is empty"
