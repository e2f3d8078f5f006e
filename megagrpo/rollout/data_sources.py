"""Where the rows of a data set come from: a file by its ending, or a function of the user's.

A source is called without arguments and returns an iterable of rows, each a mapping of columns, in an order
that is the same every time.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from megagrpo.errors import UserError
from megagrpo.registry import Registry, is_code_place, require_call

DataSource = Callable[[], Iterable[Mapping[str, Any]]]


def _read_source(attribute: Any) -> Callable[..., Iterable[Any]]:
    require_call(attribute, [])
    return attribute


# readers of files by their ending, called with the path; a user's source is called without arguments
DATA_SOURCES: Registry[Callable[..., Iterable[Any]]] = Registry("data source", _read_source)


def find_source(source: str) -> DataSource:
    """Return what yields the rows of `source`: the path of a file, or the place of a user's function.

    Raises:
        UserError: no such file, an ending that nothing reads, or a function that can't be loaded or called.
    """
    path = Path(source).expanduser()
    if not path.is_file() and is_code_place(source):
        return DATA_SOURCES.find(source)
    if not path.is_file():
        hint = (
            "; names of the Hugging Face hub are not read: download the data set, or return its rows from "
            "FILE.py:function"
            if looks_like_hub_name(source)
            else ""
        )
        raise UserError(f"no such file{hint}")
    ending = path.suffix.lstrip(".").lower()
    if ending not in DATA_SOURCES.names():
        raise UserError(
            f"nothing reads .{ending} files, only {', '.join(f'.{name}' for name in DATA_SOURCES.names())}; "
            "anything else is read by a FILE.py:function that returns rows"
        )
    reader = DATA_SOURCES.get(ending)
    return lambda: reader(path)


def looks_like_hub_name(source: str) -> bool:
    """Return whether `source` may be meant as OWNER/NAME of the Hugging Face hub: no such path, no ending."""
    parts = source.split("/")
    return (
        len(parts) == 2 and all(parts) and not source.startswith((".", "~")) and not Path(parts[0]).exists()
    )


def read_rows(place: str, source: str, limit: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a source, at most `limit`.

    Raises:
        UserError: one line that begins with `place: source` for whatever is wrong.
    """
    try:
        rows = find_source(source)()
        if not isinstance(rows, Iterable):
            raise UserError(f"returned a {type(rows).__name__}, not an iterable of rows")
        for index, row in enumerate(islice(rows, limit)):
            if not isinstance(row, Mapping):
                raise UserError(f"row {index}: is a {type(row).__name__}, not an object with columns")
            yield row
    except UserError as error:
        raise UserError(f"{place}: {source}: {str(error).removeprefix(f'{source}: ')}") from error
    except Exception as error:  # a user's code
        raise UserError(
            f"{place}: {source}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


@DATA_SOURCES.register("jsonl")
def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield one row per line."""
    with path.open(encoding="utf-8-sig") as lines:
        number = 0  # the last line that could be read
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_json(line, f"line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"after line {number}: not UTF-8 text{_binary_hint(path)}") from error


@DATA_SOURCES.register("json")
def read_json(path: Path) -> Iterator[Any]:
    """Yield the entries of a JSON array, or the rows of a file of JSON lines by this ending."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text{_binary_hint(path)}") from error
    if text.lstrip().startswith("["):
        yield from _parse_json(text, "the array")
    else:
        yield from read_jsonl(path)


@DATA_SOURCES.register("csv")
def read_csv(path: Path) -> Iterator[Any]:
    """Yield one row per record, every column a string, named by the first line."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)


@DATA_SOURCES.register("parquet")
def read_parquet(path: Path) -> Iterator[Any]:
    """Yield the rows of a Parquet file."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "a Parquet file is read with pyarrow, which is not installed: pip install pyarrow"
        ) from error
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _parse_json(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            hint = "; an array over several lines is read from a file that ends in .json"
        else:
            hint = ""
        raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}{hint}") from error
    except RecursionError:
        raise UserError(f"{where}: nested too deep") from None
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: holds half of a character (a lone surrogate): {error.object[error.start]!a}"
        ) from error
    return value


def _binary_hint(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        return ": it is a Parquet file; name it .parquet"
    return ": it is compressed" if start[:2] == b"\x1f\x8b" else ""
