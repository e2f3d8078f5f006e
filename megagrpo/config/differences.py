"""Lists the fields of a configuration that differ from the defaults."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from megagrpo.config.load import load_config
from megagrpo.errors import UserError


def differences(config: BaseModel) -> list[str]:
    """Return `PLACE: VALUE (default DEFAULT)` of each field whose value is not its default."""
    return [
        f"{place}: {value}" if default is None else f"{place}: {value} (default {default})"
        for place, value, default in _differing(config)
    ]


def read_settings(run_dir: Path) -> dict[str, str] | None:
    """Return {place: value} of each field of a run's `config.yaml` whose value is not its default; None
    before that file is written whole.
    """
    try:
        config = load_config(run_dir / "config.yaml", [])
    except UserError:  # not there, or cut off where the disk was full
        return None
    return {place: value for place, value, _ in _differing(config)}


def _differing(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str | None]]:
    """Yield (place, value, default; None where the field has none)."""
    for name, field in type(config).model_fields.items():
        value, place = getattr(config, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _differing(value, f"{place}.")
        elif field.is_required():
            yield place, _show(value), None
        elif value != (default := field.get_default(call_default_factory=True)):
            yield place, _show(value), _show(default)


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_show, value)) or "none"
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", value))
    if isinstance(value, str) and value.isprintable() and value:
        return value
    return json.dumps(value, default=str, ensure_ascii=False)  # a line break is seen
