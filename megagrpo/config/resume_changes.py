"""What differs between the configuration of a checkpoint and that of the run which goes on from it. No torch
here.

A field is harmless where the schema says so (`section.FREE`, on a field or on a whole section): it changes
where and how fast things are computed, or what is reported, not what is learned. Every other change stops the
resume unless `run.allow_config_changes` names it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megagrpo.config.mistakes import sections_of
from megagrpo.config.schema import Config
from megagrpo.config.section import FREE


@dataclass(frozen=True)
class ConfigChange:
    """One field that differs."""

    place: str  # section.field
    saved: Any
    own: Any
    is_free: bool

    def __str__(self) -> str:
        return f"{self.place}: {_shown(self.saved)} in the checkpoint, {_shown(self.own)} in this run"


def find_changes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the fields that differ, in the order of the schema; a field that one side does not know has None
    there.

    Args:
        saved: a dumped Config, perhaps of an older version of this package.
        own: a dumped Config.
    """
    free = frozenset(free_places(Config))
    old, new = dict(_flatten(saved)), dict(_flatten(own))
    changes = []
    for place in [*new, *(place for place in old if place not in new)]:
        if old.get(place) != new.get(place):
            parts = place.split(".")
            is_free = any(".".join(parts[: depth + 1]) in free for depth in range(len(parts)))
            changes.append(ConfigChange(place, old.get(place), new.get(place), is_free))
    return changes


def refused(changes: Sequence[ConfigChange], allowed: Sequence[str]) -> list[ConfigChange]:
    """Return the changes that stop a resume: neither harmless nor named in `allowed` (a field, or a
    section for all of its fields).
    """
    return [
        change
        for change in changes
        if not change.is_free
        and not any(change.place == name or change.place.startswith(f"{name}.") for name in allowed)
    ]


def free_places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the sections and fields that the schema marks as harmless."""
    for name, field in model.model_fields.items():
        place = f"{prefix}{name}"
        if FREE in field.metadata:
            yield place
            continue
        for section in sections_of(field.annotation):
            yield from free_places(section, f"{place}.")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
