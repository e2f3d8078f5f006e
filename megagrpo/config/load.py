"""From a YAML file with a `base:` chain and dotted overrides to a frozen `Config`, with every mistake
reported at once.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megagrpo.config.mistakes import describe_errors, sections_of
from megagrpo.config.schema import Config
from megagrpo.config.secrets import find_secrets
from megagrpo.config.yaml_core import format_yaml, parse_yaml, read_yaml_file
from megagrpo.errors import ConfigError, UserError

BASE = "base"  # the one key of a file that is no section: the file that this one builds on


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read the file at `path`, its bases, the overrides and the preset; return the checked configuration.

    Later wins: base files, the file itself, overrides. Mappings merge, lists replace. `algorithm.preset`
    fills only what none of them set. Relative paths stay relative to the current directory; `base` alone is
    relative to the file that names it.

    Args:
        path: a YAML file.
        overrides: `section.field=value`, the value in YAML; a number selects an entry of a list
            (`rewards.functions.0.weight=2`).

    Raises:
        ConfigError: one line per mistake.

    Example:
        >>> config = load_config("configs/gsm8k.yaml", ["rollout.temperature=0.8", "parallel.tp=2"])  #
        doctest: +SKIP
    """
    raw = read_with_bases(Path(path))
    problems: list[str] = []
    for override in overrides:
        try:
            apply_override(raw, override)
        except ConfigError as error:
            problems.extend(error.problems)
    _drop_empty_sections(raw, Config)
    raw = _fill_from_preset(raw, problems)
    problems.extend(find_secrets(raw))
    try:
        # JSON input makes pydantic strict about types ("8" is no number, true no integer) while it still
        # takes lists for tuples.
        config = Config.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        problems.extend(describe_errors(error, Config))
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """Return `config` as YAML with every field written out; `load_config` reads it back to an equal
    Config.
    """
    return format_yaml(config.model_dump(mode="json"))


def read_with_bases(path: Path) -> dict[str, Any]:
    """Return the mapping in the file at `path`, merged over those of its `base:` chain.

    Raises:
        ConfigError: a file is missing, is none or malformed, or the chain is a circle.
    """
    chain: list[dict[str, Any]] = []
    visited: list[Path] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in [seen.resolve() for seen in visited]:
            raise ConfigError(
                [f"{visited[-1]}: base: a circle: {' -> '.join(str(seen) for seen in [*visited, current])}"]
            )
        if visited and not current.exists():
            raise ConfigError([f"{visited[-1]}: base: {current}: no such file"])
        if visited and not current.is_file():
            raise ConfigError([f"{visited[-1]}: base: {current}: is no file (a folder, a device or a pipe)"])
        visited.append(current)
        content = read_yaml_file(current)
        base = content.pop(BASE, None)
        if base is not None and not isinstance(base, str):
            raise ConfigError([f"{current}: base: must be the path of one file"])
        chain.append(content)
        current = current.parent / base if base is not None else None
    merged: dict[str, Any] = {}
    for content in reversed(chain):
        merge(merged, content)
    return merged


def merge(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Write `source` over `target` in place: mappings merge to any depth, everything else replaces."""
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = value


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Write one `section.field=value` into `raw` in place; whether the name exists is for the validation to
    say.

    Raises:
        ConfigError: there is no `=`, no name, the value is not YAML, or the number of a list entry is too
            large.
    """
    place, equals, text = override.partition("=")
    keys = place.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"{override}: an override is written section.field=value"])
    value = parse_yaml(text, place)
    node: Any = raw
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                where = ".".join(keys[:depth])
                raise ConfigError(
                    [
                        f"{place}: {where} is a list of {len(node)}: its entries are {where}.0 "
                        f"to {where}.{len(node) - 1}"
                    ]
                )
            index: Any = int(key)
        else:
            index = key
        if last:
            _replace(node, index, value)
        else:
            child = node[index] if isinstance(node, list) else node.get(index)
            if not isinstance(child, (dict, list)):
                child = node[index] = {}
            node = child


def _replace(node: Any, index: Any, value: Any) -> None:
    old = node[index] if isinstance(node, list) else node.get(index)
    if isinstance(old, dict) and isinstance(value, dict):
        merge(old, value)
    else:
        node[index] = value


def _drop_empty_sections(raw: dict[str, Any], model: type[BaseModel]) -> None:
    """A section whose lines are all commented out reads as null: it means "nothing set"."""
    for name, field in model.model_fields.items():
        sections = sections_of(field.annotation)
        if not sections or name not in raw:
            continue
        if raw[name] is None:
            del raw[name]
        elif isinstance(raw[name], dict):
            for section in sections:
                _drop_empty_sections(raw[name], section)


def _fill_from_preset(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Let `algorithm.preset` fill what the user left out; a malformed file is left for the validation to
    describe.
    """
    algorithm = raw.get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("preset"), str):
        return raw
    if not all(isinstance(section, dict) for section in raw.values()):
        return raw
    # lazy: the config package stands below the algorithms
    from megagrpo.config.presets import apply_preset

    try:
        return apply_preset(raw)
    except UserError as error:
        problems.extend(
            line if line.startswith("algorithm.preset") else f"algorithm.preset: {line}"
            for line in str(error).splitlines()
        )
        return raw
