"""What ranks tell each other comes back as it was, and reading it runs nothing."""

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.parallel.plain_data import decode, encode, exchangeable


@exchangeable
@dataclass(frozen=True)
class Point:
    place: Any
    notes: Any = field(default_factory=dict)


@exchangeable
@dataclass(frozen=True)
class Nothing:
    pass


# half a surrogate pair too: a token's text may hold one
TEXTS = st.text(st.characters(exclude_categories=[]))
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


def containers(inner):
    records = st.builds(Point, inner, inner) | st.builds(Nothing)
    rows = st.integers(0, 3).flatmap(lambda width: st.lists(st.tuples(*[inner] * width)))
    same_keys = st.lists(TEXTS, unique=True, max_size=3).flatmap(
        lambda keys: st.lists(st.fixed_dictionaries(dict.fromkeys(keys, inner)), max_size=3)
    )
    lists = st.lists(inner, max_size=4) | st.lists(records, max_size=4) | rows | same_keys
    return (
        lists | lists.map(tuple) | st.dictionaries(HASHABLE, inner, max_size=4) | st.sets(HASHABLE) | records
    )


VALUES = st.recursive(HASHABLE, containers, max_leaves=12)


def written_out(value):
    """A value with its types, in a form in which NaN equals NaN, 0.0 is not -0.0, and 1 is not True."""
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else value.hex()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [written_out(one) for one in value]
    if isinstance(value, set):
        return "set", sorted(map(repr, map(written_out, value)))
    if isinstance(value, dict):
        return "dict", [(written_out(key), written_out(one)) for key, one in value.items()]
    if isinstance(value, Point):
        return "Point", written_out(value.place), written_out(value.notes)
    return type(value).__name__, repr(value)


@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value):
    assert written_out(decode(encode(value))) == written_out(value)


@pytest.mark.parametrize(
    "value",
    [
        [True, 1, 1.0],
        [(True,), (1,)],
        [{"a": 1}, {"a": True}],
        [{"a": 1, "b": 2}, {"b": 1, "a": 2}],
        [{1: 1}, {True: 1}],
        [(), ()],
        [Nothing(), Nothing()],
        {(3, 1): -0.0, (3, 2): math.nan},
        ["\ud83d\ude00", "\U0001f600"],
        2**200,
    ],
    ids=repr,
)
def test_values_that_are_nearly_equal_stay_apart(value):
    assert written_out(decode(encode(value))) == written_out(value)


def test_scalars_of_numpy_come_back_as_pythons():
    told = decode(encode([np.int64(3), np.float32(0.5), np.bool_(True)]))
    assert written_out(told) == written_out([3, 0.5, True])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [object()]}, "builtins.object"),
        ([len], "builtins.builtin_function_or_method"),
        (Path("/"), r"pathlib.\w+"),
        (np.zeros(3), "numpy.ndarray"),
        (type("Point", (), {})(), r"\S+.Point"),
        ([type("Point", (), {})()] * 2, r"\S+.Point"),
    ],
    ids=["object", "function", "path", "array", "a class of the same name", "several of them"],
)
def test_other_values_are_refused_by_their_type(value, named):
    with pytest.raises(TypeError, match=f"^{named} is not a plain value that ranks can exchange$"):
        encode(value)


def test_two_classes_cannot_have_one_name():
    with pytest.raises(AssertionError, match="two classes are named Point"):
        exchangeable(dataclass(type("Point", (), {})))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'["record","Path","/"]',
        b'["record"]',
        b'["list","each",[{"a":1}]]',
        b'["list","scalars",[[1]]]',
        b'["list","records",1,"Path",["scalars",["/"]]]',
        b'["bytes","zz"]',
        b'[["list"]]',
        b"[]",
        b"[" * 100_000,
        pickle.dumps([1]),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_other_data_is_refused(data):
    with pytest.raises(ValueError):
        decode(data)
