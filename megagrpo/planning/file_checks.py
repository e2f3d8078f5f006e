"""Checks of the files that a configuration names. They read the disk, no more than a `config.json`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megagrpo.config.model_folder import hf_folder_of
from megagrpo.config.schema import Config
from megagrpo.registry import is_code_place


def read_hf_config(path: str) -> dict[str, Any] | None:
    """Return the `config.json` of the model folder at `path`, or None where there is none that can be read
    (`check_files` says why).
    """
    try:
        content = json.loads((hf_folder_of(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_files(config: Config) -> Iterator[str]:
    """Yield one line for each file that is missing or cannot be what the field says."""
    yield from _check_model(config.model.path)
    if config.model.tokenizer is not None and not Path(config.model.tokenizer).is_dir():
        yield f"model.tokenizer: {config.model.tokenizer}: no such folder"
    yield from _check_source("data.source", config.data.source)
    for position, held_out in enumerate(config.evaluation.sets):
        yield from _check_source(f"evaluation.sets.{position}.source", held_out.source)
    for position, reward in enumerate(config.rewards.functions):
        if is_code_place(reward.name):
            yield from _check_source(f"rewards.functions.{position}.name", reward.name)


def _check_model(path: str) -> Iterator[str]:
    folder = Path(path)
    if not folder.is_dir():
        yield f"model.path: {path}: no such folder"
    elif not (hf_folder_of(folder) / "config.json").is_file():
        yield (
            f"model.path: {path}: no config.json in it; an HF folder has config.json, safetensors and a "
            "tokenizer"
        )
    elif read_hf_config(path) is None:
        yield f"model.path: {path}/config.json: not a JSON object"


def _check_source(place: str, source: str) -> Iterator[str]:
    if is_code_place(source):
        location = source.rpartition(":")[0]
        if location.endswith(".py") and not Path(location).is_file():
            yield f"{place}: {location}: no such file"
    elif not Path(source).is_file():
        yield f"{place}: {source}: no such file"
    elif Path(source).stat().st_size == 0:
        yield f"{place}: {source}: the file is empty"
