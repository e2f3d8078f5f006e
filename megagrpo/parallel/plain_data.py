"""Plain values as bytes, and back: what ranks tell each other, in a format whose reading runs nothing.

JSON, in which every container names its type: [name, ...]. Values are None, bool, int, float (NaN and the
infinities too), str, bytes, list, tuple, set and dict, with any of them as keys, and the dataclasses that
`exchangeable` knows. The types come back as they went in, exactly; but numpy's scalars come back as Python's.

A step's records are thousands of equal dataclasses. Sequences of one kind are therefore written by columns,
and a column of scalars is one JSON list: the codec's Python code runs for each field, not for each value.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

Class = TypeVar("Class", bound=type)

_SCALARS = frozenset({type(None), bool, int, float, str})
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set"}
_BUILDERS: dict[str, Callable[[Iterable[Any]], Any]] = {name: kind for kind, name in _CONTAINERS.items()}
_exchangeable: dict[str, type] = {}


def exchangeable(kind: Class) -> Class:
    """Let the values of a dataclass pass between ranks, as its fields. A decorator, or called for a class
    that is declared elsewhere; a name stands for one class.
    """
    assert is_dataclass(kind), f"{kind.__name__} is no dataclass"
    assert not hasattr(kind, "__slots__"), f"{kind.__name__} has slots"
    assert _exchangeable.setdefault(kind.__name__, kind) is kind, f"two classes are named {kind.__name__}"
    return kind


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        TypeError: names the type in the value that is not a plain one.
    """
    # half a surrogate pair is a character of Python's that JSON's escapes would join to another half
    text = json.dumps(_pack(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes) -> Any:
    """Return what `encode` was given.

    Raises:
        ValueError: `encode` has not written it.
    """
    try:
        return _unpack(json.loads(data.decode("utf-8", "surrogatepass")))
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"no plain data: {type(error).__name__}: {error}") from None


def _pack(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in _CONTAINERS:
        return [_CONTAINERS[kind], *_pack_sequence(list(value))]
    if kind is dict:
        return ["dict", _pack_sequence(list(value)), _pack_sequence(list(value.values()))]
    if kind is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, np.generic):
        return _pack(value.item())
    return ["record", _name(kind), *([_pack(getattr(value, field)) for field in _field_names(kind)])]


def _unpack(packed: Any) -> Any:
    if type(packed) is not list:
        if type(packed) in _SCALARS:
            return packed
        raise ValueError("no plain data: an object of JSON")
    name, *rest = packed
    if name in _BUILDERS:
        return _BUILDERS[name](_unpack_sequence(rest))
    if name == "dict":
        return dict(zip(*map(_unpack_sequence, rest), strict=True))
    if name == "bytes":
        return bytes.fromhex(rest[0])
    if name == "record":
        return _build_records(rest[0], [list(map(_unpack, rest[1:]))])[0]
    raise ValueError(f"no plain data: {name!r}")


def _pack_sequence(values: Sequence[Any]) -> list:
    """Return [kind, ...]: `scalars` as they are, columns of equal tuples, dicts or records, or each value."""
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return ["scalars", values]
    if len(kinds) == 1 and len(values) > 1:
        kind, first = kinds.pop(), values[0]
        if kind is tuple and set(map(len, values)) == {len(first)}:
            return ["tuples", len(values), *map(_pack_sequence, map(list, zip(*values, strict=True)))]
        if kind is dict and _have_same_keys(values):
            columns = [[value[key] for value in values] for key in first]
            return ["dicts", len(values), list(first), *map(_pack_sequence, columns)]
        if kind.__name__ in _exchangeable:
            name = _name(kind)
            columns = [list(map(attrgetter(field), values)) for field in _field_names(kind)]
            return ["records", len(values), name, *map(_pack_sequence, columns)]
    return ["each", list(map(_pack, values))]


def _unpack_sequence(packed: Sequence[Any]) -> list:
    kind, rest = packed[0], packed[1:]
    if kind == "scalars":
        if not set(map(type, rest[0])) <= _SCALARS:
            raise ValueError("no plain data: a container among scalars")
        return rest[0]
    if kind == "each":
        return list(map(_unpack, rest[0]))
    if kind == "tuples":
        return _rows(rest[0], rest[1:])
    if kind == "dicts":
        keys = rest[1]
        return [dict(zip(keys, row, strict=True)) for row in _rows(rest[0], rest[2:])]
    if kind == "records":
        return _build_records(rest[1], _rows(rest[0], rest[2:]))
    raise ValueError(f"no plain data: {kind!r}")


def _rows(count: int, columns: Sequence[Any]) -> list[tuple]:
    """Return the rows of packed columns, which may be none at all."""
    return list(zip(*map(_unpack_sequence, columns), strict=True)) if columns else [()] * count


def _build_records(name: str, rows: Iterable[Sequence[Any]]) -> list:
    """Return the records of these fields, without their constructor: a frozen one takes most of the time."""
    kind, records = _exchangeable[name], []
    names = _field_names(kind)
    for row in rows:
        record = kind.__new__(kind)
        record.__dict__.update(zip(names, row, strict=True))
        records.append(record)
    return records


def _have_same_keys(values: Sequence[dict]) -> bool:
    """Say whether dicts have the same keys, texts all, in the same order."""
    keys = list(values[0])
    return set(map(type, keys)) <= {str} and all(list(value) == keys for value in values)


def _name(kind: type) -> str:
    if _exchangeable.get(kind.__name__) is not kind:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a plain value that ranks can exchange")
    return kind.__name__


def _field_names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]
