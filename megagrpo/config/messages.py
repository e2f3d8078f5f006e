"""One plain line for each mistake in a configuration: the place, the value, what is allowed."""

import difflib
import json
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from megagrpo.config.near_names import GENERIC, known_elsewhere
from megagrpo.registry import suggestion

Location = tuple[str | int, ...]

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
    location, kind, context = item["loc"], item["type"], item.get("ctx", {})
    place = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        yield f"{place}: not a field{_hint(location, root)}"
    elif kind == "missing":
        yield from (f"{'.'.join([place, *rest])}: missing" for rest in _required_below(location, root))
    elif kind == "literal_error":
        names = _literal_values(context["expected"])
        yield (
            f"{place}: {format_value(item['input'])}: must be one of "
            f"{', '.join(names)}{suggestion(str(item['input']), names)}"
        )
    elif kind in ("model_type", "model_attributes_type"):
        fields = ", ".join(_model_at(location, root).model_fields)
        yield f"{place}: {format_value(item['input'])}: must be a section with some of the fields {fields}"
    elif kind == "value_error":
        text = str(context["error"])
        names_field = text.partition(":")[0] in _model_at(location, root).model_fields
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


def _hint(location: Location, root: type[BaseModel]) -> str:
    """Where a name that is no field may have been meant: near in its section, elsewhere, or else the
    section's fields.
    """
    *parents, name = (str(part) for part in location)
    fields = list(_model_at(location[:-1], root).model_fields)
    if known := known_elsewhere(".".join(map(str, location))):
        return f"; {known}"
    # two short names are near by chance: three letters of four must agree
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.6 if len(name) > 4 else 0.75)
    elsewhere = [path for path in field_paths(root) if path.rsplit(".", 1)[-1] == name not in GENERIC]
    if near and (not elsewhere or difflib.SequenceMatcher(None, name, near[0]).ratio() >= 0.8):
        return f"; did you mean {near[0]}?"
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    what = f"{'.'.join(parents)} has" if parents else "the sections are"
    return f"; {what} {', '.join(fields)}"


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of each field that holds a value (not of sections), in the order of
    declaration.
    """
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name
        elif get_origin(field.annotation) is None:
            yield from field_paths(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model that `annotation` is, or holds as an entry or alternative; None for plain values."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    if get_origin(annotation) in (tuple, list, Union, types.UnionType):
        return next((found for argument in get_args(annotation) if (found := section_of(argument))), None)
    return None


def field_places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all sections and fields of a model."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and (section := section_of(field.annotation)) is not None:
            yield from field_places(section, f"{prefix}{name}.")


def _model_at(location: Location, root: type[BaseModel]) -> type[BaseModel]:
    model = root
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = section_of(model.model_fields[part].annotation) or model
    return model


def _required_below(location: Location, root: type[BaseModel]) -> Iterator[list[str]]:
    """The required fields of a missing section; the missing value itself where it is no section."""
    parent = _model_at(location[:-1], root)
    field = parent.model_fields.get(str(location[-1]))
    section = (
        section_of(field.annotation) if field is not None and get_origin(field.annotation) is None else None
    )
    if section is None:
        yield []
        return
    for name, inner in section.model_fields.items():
        if inner.is_required():
            yield [name]


def _literal_values(expected: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return [part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")]
