"""One plain line for each mistake in a configuration: the place, the value, what is allowed."""

import difflib
import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from megagrpo.config.near_names import GENERIC, known_elsewhere
from megagrpo.registry import suggestion

Location = tuple[str | int, ...]

DISCRIMINATORS = ("kind", "name")  # the field that says which kind of section it is

_ALLOWED = {  # pydantic's error type -> what the field takes; {names} are filled from the error's context
    "missing": "missing",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}


def describe_errors(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line per mistake in `error`, in the order of the fields.

    Args:
        error: what the validation of `root` raised.
        root: the model that was validated; its fields are what a misspelt name is compared with.
    """
    items = error.errors(include_url=False)
    lines: list[str] = []
    for item in items:
        below = any(
            len(other["loc"]) > len(item["loc"]) and other["loc"][: len(item["loc"])] == item["loc"]
            for other in items
        )
        if item["type"] == "too_short" and below:
            continue  # the entries are there, they are wrong: pydantic counts the valid ones only
        lines.extend(_describe(item, root))
    return lines


def _describe(item: Any, root: type[BaseModel]) -> Iterator[str]:
    kind, context = item["type"], item.get("ctx", {})
    location, model = _walk(item["loc"], root)
    parent = _walk(item["loc"][:-1], root)[1]
    place = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        yield f"{place}: not a field{_hint(location, parent, root)}"
    elif kind == "missing":
        yield from (f"{'.'.join([place, *rest])}: missing" for rest in _required_below(location, parent))
    elif kind == "literal_error":
        names = _literal_values(context["expected"])
        yield (
            f"{place}: {format_value(item['input'])}: must be one of "
            f"{', '.join(names)}{suggestion(str(item['input']), names)}"
        )
    elif kind in ("model_type", "model_attributes_type"):
        fields = ", ".join(model.model_fields)
        kinds = [
            name for name in DISCRIMINATORS if isinstance(item["input"], str) and name in model.model_fields
        ]
        written = f"; say {place}: {{{kinds[0]}: {item['input']}}}" if kinds else ""
        yield (
            f"{place}: {format_value(item['input'])}: must be a section with some of the fields "
            f"{fields}{written}"
        )
    elif kind == "value_error":
        text = str(context["error"])
        names_field = text.partition(":")[0] in model.model_fields
        yield f"{place}.{text}" if names_field else f"{place}: {text}"
    else:
        allowed = _ALLOWED.get(kind, "is not a value that this field takes")
        allowed = allowed.format(
            **{name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        )
        if allowed == "must have at least 1 entries":
            allowed = "must have at least one entry"
        yield f"{place}: {format_value(item['input'])}: {allowed}"


def format_value(value: Any) -> str:
    """Return `value` as one short line: strings quoted, long values cut."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hint(location: Location, parent: type[BaseModel], root: type[BaseModel]) -> str:
    """Where a name that is no field may have been meant: near in its section, elsewhere, or else the
    section's fields.
    """
    *parents, name = (str(part) for part in location)
    fields = list(parent.model_fields)
    place = ".".join(map(str, location))
    if known := known_elsewhere(place):
        return f"; {known}"
    if kinds := _kinds_with(place, root):
        return f"; it is one of {', '.join(kinds)}"
    # two short names are near by chance: three letters of four must agree
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.6 if len(name) > 4 else 0.75)
    elsewhere = [path for path in field_paths(root) if path.rsplit(".", 1)[-1] == name not in GENERIC]
    if near and (not elsewhere or difflib.SequenceMatcher(None, name, near[0]).ratio() >= 0.8):
        return f"; did you mean {near[0]}?"
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    what = f"{'.'.join(parents)} has" if parents else "the sections are"
    return f"; {what} {', '.join(fields)}"


def _kinds_with(place: str, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the kinds of a section, as `engine.name vllm`, to which the field at `place` belongs."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        here = f"{prefix}{name}."
        variants = variants_of(field.annotation)
        for tag, section in variants.items():
            if place in [path for path, _ in _fields_below(section, here)]:
                kind = next(name for name in DISCRIMINATORS if name in section.model_fields)
                found.append(f"{here}{kind} {tag}")
        if not variants and place.startswith(here):
            for section in sections_of(field.annotation):
                found += _kinds_with(place, section, here)
    return found


def field_paths(model: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted path of each field that holds a value (not of sections), in the order of
    declaration, those of all variants of a section.
    """
    yield from dict.fromkeys(place for place, is_section in _fields_below(model) if not is_section)


def field_places(model: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted names of all sections and fields of a model, those of all variants of a section."""
    yield from dict.fromkeys(place for place, _ in _fields_below(model))


def _fields_below(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    for name, field in model.model_fields.items():
        sections = sections_of(field.annotation)
        yield f"{prefix}{name}", bool(sections)
        for section in sections:
            yield from _fields_below(section, f"{prefix}{name}.")


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the section that a field is, or the variants of it; none for values and for lists."""
    variants = variants_of(annotation)
    if variants:
        return list(variants.values())
    is_section = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    return [annotation] if is_section and issubclass(annotation, BaseModel) else []


def variants_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the variants of a section by their tags; empty where it has none."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return {}
    parts = [get_args(part) for part in get_args(annotation) if get_origin(part) is Annotated]
    return {part[1].tag: part[0] for part in parts if isinstance(part[1], Tag)}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model that `annotation` is, or holds as an entry or alternative; None for plain values."""
    if sections := sections_of(annotation):
        return sections[0]
    if get_origin(annotation) in (tuple, list, Union, types.UnionType):
        return next((found for argument in get_args(annotation) if (found := section_of(argument))), None)
    return None


def _walk(location: Location, root: type[BaseModel]) -> tuple[Location, type[BaseModel]]:
    """Return the location as it is written in a file, and the model of its last section; pydantic's own has
    the tags of sections that come in variants too.
    """
    written: list[str | int] = []
    model = root
    variants: dict[str, type[BaseModel]] = {}
    for part in location:
        if part in variants:
            model, variants = variants[str(part)], {}
            continue
        written.append(part)
        variants = {}
        if isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            variants = variants_of(annotation)
            model = section_of(annotation) or model
    return tuple(written), model


def _required_below(location: Location, parent: type[BaseModel]) -> Iterator[list[str]]:
    """The required fields of a missing section; the missing value itself where it is no section, or where the
    section has none (one of several is needed).
    """
    field = parent.model_fields.get(str(location[-1]))
    section = (
        section_of(field.annotation) if field is not None and get_origin(field.annotation) is None else None
    )
    fields = section.model_fields.items() if section is not None else ()
    yield from [[name] for name, inner in fields if inner.is_required()] or [[]]


def _literal_values(expected: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")]
