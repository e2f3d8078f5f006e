"""Unit tests of a code problem: what a column may hold, and when an output or a result is right."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megagrpo.rewards.sandbox.run_program import FunctionCall

_FORMS = (
    "[{input: text, output: text}], [{call: name, args: [...], want: value}] or "
    "{inputs: [...], outputs: [...], fn_name: name}"
)


@dataclass(frozen=True)
class CodeTest:
    """One test: standard input and output, or a call and its result."""

    want: Any  # the text printed, or the call's result
    stdin: str = ""
    call: FunctionCall | None = None


def read_tests(column: Any) -> list[CodeTest]:
    """Return the tests that a column holds, as values or JSON text; raises ValueError where it has none."""
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except ValueError:
            raise ValueError(f"the tests are no JSON: {column[:60]!r}; allowed: {_FORMS}") from None
    if isinstance(column, Mapping):
        column = _rows_of(column)
    if not isinstance(column, Sequence) or isinstance(column, str) or not column:
        raise ValueError(f"the tests are {column!r:.80}; allowed: {_FORMS}")
    return [_read_test(row) for row in column]


def _rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per test of the form of APPS and TACO (arXiv 2105.09938)."""
    inputs, outputs = columns.get("inputs"), columns.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the tests need as many outputs as inputs")
    name = columns.get("fn_name")
    if name is None:
        return [{"input": given, "output": want} for given, want in zip(inputs, outputs, strict=True)]
    return [{"call": name, "args": given, "want": want} for given, want in zip(inputs, outputs, strict=True)]


def _read_test(row: Any) -> CodeTest:
    if isinstance(row, Mapping):
        if isinstance(row.get("output"), str) and isinstance(row.get("input", ""), str):
            return CodeTest(row["output"], stdin=row.get("input", ""))
        arguments = row.get("args", [])
        if "want" in row and isinstance(row.get("call"), str) and isinstance(arguments, list):
            return CodeTest(row["want"], call=FunctionCall(row["call"], arguments, row.get("kwargs", {})))
    raise ValueError(f"a test is {row!r:.80}; allowed: {_FORMS}")


def is_same_output(output: str, want: str) -> bool:
    """Return whether two printed texts agree: line by line, word by word, blank lines at the end ignored.
    Where a number is expected with a decimal point, a relative 1e-6 may lie between.
    """
    lines, wanted = output.rstrip().split("\n"), want.rstrip().split("\n")
    if len(lines) != len(wanted):
        return False
    for line, wanted_line in zip(lines, wanted, strict=True):
        words, wanted_words = line.split(), wanted_line.split()
        if len(words) != len(wanted_words) or not all(map(_is_same_word, words, wanted_words)):
            return False
    return True


def _is_same_word(word: str, want: str) -> bool:
    if word == want:
        return True
    if "." not in want or "_" in word or "_" in want:  # float() reads 1_000
        return False
    try:
        return math.isclose(float(word), float(want), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def is_same_result(result: Any, want: Any) -> bool:
    """Return whether two values of JSON agree: kind by kind (true is no 1); floats up to a relative 1e-6."""
    if isinstance(result, bool) or isinstance(want, bool):
        return result is want
    if isinstance(result, float) or isinstance(want, float):
        numbers = isinstance(result, (int, float)) and isinstance(want, (int, float))
        return numbers and (result == want or math.isclose(result, want, rel_tol=1e-6, abs_tol=1e-9))
    if isinstance(result, list) and isinstance(want, list):
        return len(result) == len(want) and all(map(is_same_result, result, want))
    if isinstance(result, dict) and isinstance(want, dict):
        return result.keys() == want.keys() and all(is_same_result(result[key], want[key]) for key in want)
    return type(result) is type(want) and result == want
