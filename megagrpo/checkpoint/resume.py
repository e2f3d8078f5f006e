"""Which checkpoint a run goes on from, and whether it may: the newest one that is whole and belongs to this
run.

Damaged checkpoints are named and passed over; one that is whole but of another model, tokenizer, newer format
or refused configuration stops the run, since going on from an older one would hide the mistake.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megagrpo.checkpoint.identity import compare
from megagrpo.checkpoint.manager import CheckpointManager
from megagrpo.checkpoint.manifest import FORMAT_VERSION, OLDEST_RESUMABLE, Manifest
from megagrpo.config.resume_changes import find_changes, refused
from megagrpo.config.schema import Config
from megagrpo.config.training_sections import OptimizerConfig
from megagrpo.config.yaml_core import parse_yaml
from megagrpo.errors import UserError
from megagrpo.policy.schedule import learning_rate

CONFIG_FILE = "config.yaml"


@dataclass
class Choice:
    """The checkpoint that a run goes on from."""

    path: Path
    manifest: Manifest
    notes: list[str] = field(default_factory=list)  # what the user should know, one line each


def choose_checkpoint(manager: CheckpointManager) -> Choice | None:
    """Return the newest checkpoint whose files are all as its manifest says; damaged newer ones are set
    aside. Collective over all ranks.

    Raises:
        UserError: there are checkpoints and none of them is good, or the newest one is of a format that this
            version can't go on from.
    """
    skipped: list[Path] = []
    notes: list[str] = []
    for path in manager.candidates():
        manifest, problems = manager.examine(path)
        if manifest is not None:
            _check_format(path, manifest)
        if manifest is not None and not problems:
            notes += (
                [f"damaged checkpoint kept as {name}" for name in manager.set_aside(skipped)]
                if skipped
                else []
            )
            return Choice(path, manifest, notes)
        skipped.append(path)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        notes.append(f"warning: checkpoint {path} is damaged and passed over: {problems[0]}{more}")
    if skipped:
        lines = [note.removeprefix("warning: ") for note in notes]
        raise UserError(
            "\n".join(
                [
                    *lines,
                    "run.resume: auto: no good checkpoint is left; take run.resume=never and "
                    "another run.dir to start anew",
                ]
            )
        )
    return None


def _check_format(path: Path, manifest: Manifest) -> None:
    found, writer = manifest.format_version, manifest.versions.get("megagrpo", "?")
    if OLDEST_RESUMABLE <= found <= FORMAT_VERSION:
        return
    readable = " to ".join(map(str, sorted({OLDEST_RESUMABLE, FORMAT_VERSION})))
    weights = f", or take its weights for a new run: model.path={path}" if found < OLDEST_RESUMABLE else ""
    raise UserError(
        f"{path}: has checkpoint format {found}, written by megagrpo {writer}; this version goes on from "
        f"format {readable}: go on with the version that wrote it{weights}"
    )


def check_identity(choice: Choice, model: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model or tokenizer.

    Raises:
        UserError: names every field that differs, and both values.
    """
    differences = compare("model config", choice.manifest.model, model) + compare(
        "tokenizer", choice.manifest.tokenizer, tokenizer
    )
    if differences:
        raise UserError(
            "\n".join(f"{choice.path}: is of another model or tokenizer: {line}" for line in differences)
        )


def check_config(choice: Choice, updates: int, config: Config) -> list[str]:
    """Compare the configurations field by field; return what to tell the user, one line each.

    Args:
        choice: the checkpoint.
        updates: optimizer updates that the checkpoint has behind it.
        config: of this run, the whole of it.

    Raises:
        UserError: lists all changes that are neither harmless nor allowed by name.
    """
    saved = _saved_config(choice.path)
    changes = find_changes(
        saved.model_dump(mode="json") if isinstance(saved, Config) else saved,
        json.loads(config.model_dump_json()),
    )
    stopping = refused(changes, config.run.allow_config_changes)
    if stopping:
        names = ", ".join(change.place for change in stopping)
        raise UserError(
            "\n".join(
                [
                    *(f"{choice.path}: {change}" for change in stopping),
                    "these change what is learned; go back, or allow them by name: "
                    f"run.allow_config_changes=[{names}]",
                ]
            )
        )
    notes = [
        f"changed: {change}{'' if change.is_free else ' (allowed by run.allow_config_changes)'}"
        for change in changes
    ]
    if isinstance(saved, Config):
        before, now = ((each.optimizer, each.total_updates) for each in (saved, config))
        if told := describe_schedule_change(before, now, updates):
            notes.append(told)
    return notes


def compare_environments(saved: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Return one line for each package version, or number of threads (OMP_NUM_THREADS), that is another one:
    the run goes on, but its sums may round differently.
    """
    return [
        f"warning: {name}: {saved[name]} in the checkpoint, {own[name]} in this run; its numbers may "
        "differ in their last digits"
        for name in own
        if name in saved and saved[name] != own[name]
    ]


def describe_schedule_change(
    saved: tuple[OptimizerConfig, int], own: tuple[OptimizerConfig, int], updates: int
) -> str | None:
    """Return one line where the coming updates have other learning rates than they would have had in the
    saved run; else None. `saved` and `own` are the section and the number of updates of the whole run.
    """
    for update in range(updates, max(saved[1], own[1])):
        before = learning_rate(saved[0], update, saved[1])
        now = learning_rate(own[0], update, own[1])
        if before != now:
            return (
                f"warning: the learning-rate schedule differs from update {update + 1} on: {now:g} "
                f"instead of {before:g}"
            )
    return None


def _saved_config(path: Path) -> Config | dict[str, Any]:
    """Return the checkpoint's configuration; as plain values where this version has other fields than the
    one that wrote it.
    """
    values = parse_yaml((path / CONFIG_FILE).read_text(encoding="utf-8"), str(path / CONFIG_FILE))
    try:
        return Config.model_validate_json(json.dumps(values))
    except ValidationError:
        return values
