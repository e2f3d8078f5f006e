"""YAML 1.2 core-schema reading and writing, without the surprises of YAML 1.1.

`1e-6` is a number, `no` and `off` are strings, dates stay strings, and a key written twice in one mapping is
an error.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from megagrpo.errors import ConfigError

MAX_NODES = 100_000  # a few lines of aliases of aliases write out to what no memory holds

_SCALARS = (
    ("tag:yaml.org,2002:null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    # filled below; the inherited YAML 1.1 table must not be shared
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # decimal always: YAML 1.1 would read 010 as 8


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (list, dict)):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a single value", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key} is written twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many values `node` holds where every alias is written out; no more of them are visited than
    the text has.

    Args:
        counts: of nodes that were counted before, by identity; 0 while a node is being counted.
    """
    if id(node) in counts:
        if not counts[id(node)]:
            raise yaml.composer.ComposerError(
                None, None, "an alias refers to what it lies in", node.start_mark
            )
        return counts[id(node)]
    counts[id(node)] = 0
    below: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        below = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        below = node.value
    counts[id(node)] = 1 + sum(_count_nodes(part, counts) for part in below)
    return counts[id(node)]


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count_nodes(node, {})) > MAX_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"with its aliases written out it holds {count:,} values, {MAX_NODES:,} at most"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line separators raw inside single quotes, where reading folds them to spaces.
    style = '"' if any(separator in text for separator in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def parse_yaml(text: str, place: str) -> Any:
    """Return the value that `text` describes.

    Raises:
        ConfigError: `text` is not YAML; the line starts with `place` and says where and what.
    """
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError([f"{place}{where}: not valid YAML: {error.problem or error.context}"]) from error
    except RecursionError:
        raise ConfigError([f"{place}: not valid YAML: nested too deep"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{place}: not valid YAML: {str(error).splitlines()[0]}"]) from error


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Return the mapping in the file at `path`; an empty file is an empty mapping.

    Raises:
        ConfigError: there is no file, or something else than one (a folder, a device, a pipe: reading might
            never end, and every rank reads it again), or it cannot be read, is not YAML, or does not hold a
            mapping.
    """
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a device or a pipe"
            raise ConfigError([f"{path}: is {what}, not a file"])
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError([f"{path}: no such file"]) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from error
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            [f"{path}: must hold sections of fields (`section:` with `field: value` lines below)"]
        )
    return content


def format_yaml(content: Any) -> str:
    """Return `content` as block-style YAML that `parse_yaml` reads back to an equal value; keys keep their
    order.
    """
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
