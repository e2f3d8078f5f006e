"""Where a model folder keeps its config and tokenizer: an HF folder itself, a Megatron checkpoint in
`hf_files/`; and the folder that a run reads where it changes fields of the config. Imports no torch.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megagrpo.config.training_sections import ModelConfig
from megagrpo.errors import UserError
from megagrpo.registry import suggestion

_HF_FILES = "hf_files"


def is_megatron_checkpoint(folder: str | Path) -> bool:
    """Say whether the folder is a distributed checkpoint (a run's, or a converted one)."""
    return (Path(folder) / ".metadata").is_file() and (Path(folder) / _HF_FILES).is_dir()


def hf_folder_of(folder: str | Path) -> Path:
    """Return the folder that holds config.json and the tokenizer."""
    return Path(folder) / _HF_FILES if is_megatron_checkpoint(folder) else Path(folder)


def change_config(raw: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return a model's config.json as the run reads it: without `ignore_fields`, with `overrides`."""
    return {name: value for name, value in raw.items() if name not in model.ignore_fields} | model.overrides


def problems_of_changes(raw: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    """Yield one line for each field that is ignored but is not there, or is overridden too."""
    for name in model.ignore_fields:
        if name not in raw:
            yield f"model.ignore_fields: {name}: config.json has no such field{suggestion(name, list(raw))}"
        elif name in model.overrides:
            yield f"model.ignore_fields: {name}: is in model.overrides too"


def describe_changes(raw: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return one line for each field that the run reads otherwise than config.json has it."""
    return [
        *(f"model.ignore_fields: {name}: {raw[name]!r} is left out" for name in model.ignore_fields),
        *(
            f"model.overrides: {name}: {value!r} in place of {repr(raw[name]) if name in raw else 'none'}"
            for name, value in model.overrides.items()
        ),
    ]


def write_model_folder(model: ModelConfig, target: Path) -> list[str]:
    """Write the folder that a run with changed fields reads: config.json as changed, links to the weights,
    copies of the other files. Ranks may write it at the same time: every file appears whole.

    Returns:
        What was changed, line by line.

    Raises:
        UserError: a field that can't be changed, or a folder that can't hold links.
    """
    source, inside = Path(model.path), hf_folder_of(model.path)
    raw = json.loads((inside / "config.json").read_text(encoding="utf-8"))
    if problems := list(problems_of_changes(raw, model)):
        raise UserError("\n".join(problems))
    config = json.dumps(change_config(raw, model), indent=2) + "\n"
    place = target / inside.relative_to(source)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".model.") as folder:
        staging = Path(folder)
        kept = _place_files(source, target, staging, weights="*" if inside != source else "*.safetensors")
        if inside != source:
            kept |= _place_files(inside, place, staging, weights="")
        (staging / "config.json").write_text(config, encoding="utf-8")
        os.replace(staging / "config.json", place / "config.json")
    for path in {*target.iterdir(), *place.iterdir()} - kept - {place / "config.json"}:
        if not path.is_dir():
            path.unlink(missing_ok=True)  # a file of the model that the run had before
    return describe_changes(raw, model)


def _place_files(source: Path, target: Path, staging: Path, weights: str) -> set[Path]:
    """Link the files that match `weights`, and copy the others but config.json, from `source` to `target`;
    return them.
    """
    kept = set()
    for path in source.iterdir():
        if not path.is_file() or path.name == "config.json":
            continue
        new = staging / path.name
        if weights and path.match(weights):
            try:
                new.symlink_to(path.resolve())
            except OSError as error:
                raise UserError(
                    f"{target}: can't hold a link to {path}: {error.strerror}; model.ignore_fields and "
                    "model.overrides need links, or change the model's own config.json"
                ) from None
        else:
            shutil.copyfile(path, new)
        os.replace(new, target / path.name)
        kept.add(target / path.name)
    return kept
