"""`megagrpo config`: the fields of a configuration and the names that they take, generated from the code."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megagrpo.config.mistakes import section_of, sections_of, variants_of
from megagrpo.config.near_names import known_elsewhere
from megagrpo.config.presets import PRESETS
from megagrpo.config.schema import Config
from megagrpo.errors import UserError
from megagrpo.registry import suggestion


@dataclass(frozen=True)
class Field:
    """One field of a configuration."""

    place: str
    type: str
    default: str
    description: str
    kinds: str = ""  # the kinds of its section that have it, where not all do


def fields(model: type[BaseModel] = Config, prefix: str = "", kinds: str = "") -> Iterator[Field]:
    """Yield all fields that hold values, in the order of declaration; entries of lists as `PLACE.N.FIELD`."""
    for name, field in model.model_fields.items():
        place = f"{prefix}{name}"
        if variants := variants_of(field.annotation):
            for tag, section in variants.items():
                yield from fields(section, f"{place}.", tag)
        elif sections := sections_of(field.annotation):
            yield from fields(sections[0], f"{place}.", kinds)
        else:
            default = (
                "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
            )
            yield Field(place, format_type(field), default, field.description or "", kinds)
            if entry := section_of(field.annotation):
                yield from fields(entry, f"{place}.N.", kinds)


def merged_fields() -> list[Field]:
    """Return the fields by place; those that several kinds of a section have, once, with all these kinds."""
    merged: dict[str, Field] = {}
    for field in fields():
        known = merged.get(field.place)
        kinds = f"{known.kinds}, {field.kinds}" if known and known.kinds else field.kinds
        merged[field.place] = Field(field.place, field.type, field.default, field.description, kinds)
    return list(merged.values())


def format_type(field: Any) -> str:
    """Return the type of a field as a user writes it, with its bounds."""
    return " ".join([_type(field.annotation), *_bounds(field.metadata)])


def _bounds(limits: Iterable[Any]) -> list[str]:
    return [
        f"{word} {getattr(limit, sign):g}"
        for limit in limits
        for sign, word in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(limit, sign, None) is not None
    ]


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for extra in arguments[1:] for limit in getattr(extra, "metadata", [extra])]
        return " ".join([_type(arguments[0]), *_bounds(limits)])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    plain = {str: "text", int: "whole number", float: "number", bool: "true | false", types.NoneType: "null"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "[]" if value == () else f"{value:g}" if isinstance(value, float) else str(value)


def _list_rewards() -> list[str]:
    from megagrpo.rewards import build  # noqa: F401 (registers them)
    from megagrpo.rewards.reward import REWARDS

    return [f"{name}: {_summary(REWARDS.get(name))}" for name in REWARDS.names()]


def _list_losses() -> list[str]:
    from megagrpo.algorithms.losses import LOSSES

    return [f"{name}: {_summary(LOSSES.get(name).function)}" for name in LOSSES.names()]


def _list_advantages() -> list[str]:
    from megagrpo.algorithms.advantages import ADVANTAGES

    return [f"{name}: {_summary(ADVANTAGES.get(name).function)}" for name in ADVANTAGES.names()]


def _list_engines() -> list[str]:
    from megagrpo.engines import ENGINES

    return [
        f"{name}: {'in the ranks' if ENGINES.get(name).is_embedded else 'servers in processes of their own'}"
        for name in ENGINES.names()
    ]


def _list_families() -> list[str]:
    from megagrpo.models.families import load_all
    from megagrpo.models.family import FAMILIES

    load_all()
    return FAMILIES.names()


def _list_writers() -> list[str]:
    from megagrpo.telemetry.writers import WRITERS

    return WRITERS.names()


def _list_presets() -> list[str]:
    def values(preset: Mapping[str, Any]) -> str:
        return ", ".join(f"{key} {value}" for key, value in preset.items() if not isinstance(value, dict))

    return [f"{name}: {values(preset)}" for name, preset in sorted(PRESETS.items())]


def _list_metrics() -> list[str]:
    from megagrpo.planning.metric_dictionary import format_metrics

    return format_metrics().splitlines()


LISTS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "presets": ("algorithm.preset", _list_presets),
    "losses": ("algorithm.loss", _list_losses),
    "advantages": ("algorithm.advantages", _list_advantages),
    "rewards": ("rewards.functions: [{name: ...}]", _list_rewards),
    "engines": ("engine.name", _list_engines),
    "families": ("model.path: model_type of its config.json", _list_families),
    "writers": ("telemetry.writers", _list_writers),
    "metrics": ("metrics.jsonl, TensorBoard and the report", _list_metrics),
}


def _summary(part: Any) -> str:
    paragraph = (part.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")


def describe(word: str | None) -> str:
    """Return what `megagrpo config WORD` prints: all fields (None), a list, a section, a field, or what a
    search finds.

    Raises:
        UserError: nothing has that word; what is near, or what another trainer's name is here.
    """
    everything = merged_fields()
    if word is None:
        lists = "\n".join(
            f"  megagrpo config {name:<11} names for {place}" for name, (place, _) in LISTS.items()
        )
        rows = "\n".join(map(_row, everything))
        return f"{rows}\n\nMore: megagrpo config FIELD, SECTION or any word to search for;\n{lists}"
    if word in LISTS:
        place, entries = LISTS[word]
        own = "" if word in ("presets", "metrics", "families") else "; or your own as FILE.py:NAME"
        return "\n".join([f"{word} ({place}{own})", *(f"  {line}" for line in entries())])
    exact = [field for field in everything if field.place == word]
    if exact:
        return _page(exact[0])
    section = [field for field in everything if field.place.startswith(f"{word}.")]
    if section:
        return "\n".join(map(_row, section))
    found = [field for field in everything if word.lower() in f"{field.place} {field.description}".lower()]
    if found:
        return "\n".join(map(_row, found))
    if known := known_elsewhere(word):
        return f"{word}: {known}"
    near = [field.place for field in everything] + list(LISTS)
    raise UserError(f"{word}: no field, section or list has this word{suggestion(word, near)}")


def _row(field: Field) -> str:
    kinds = f" ({field.kinds})" if field.kinds else ""
    return f"{field.place} = {field.default}{kinds}\n    {field.description}".rstrip()


def _page(field: Field) -> str:
    lines = [field.place, f"  takes    {field.type}", f"  default  {field.default}"]
    lines += [f"  kinds    {field.kinds}"] if field.kinds else []
    lines += [
        f"  names    megagrpo config {name}" for name, (place, _) in LISTS.items() if place == field.place
    ]
    lines += [f"  meaning  {field.description}"] if field.description else []
    return "\n".join([*lines, f"  set it   {field.place}=VALUE on the command line, or in the YAML file"])
