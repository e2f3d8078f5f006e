"""Runs the commands that the README of every example shows, and compares the figures with those it states.
Where no example is named it goes on with what else the READMEs show (`readme_commands.py`).

    python tools/check_examples.py [examples/quickstart ...] [--json FILE]        # all of them: minutes

The first code block of a README holds the commands, one a line, and a table like this one the figures of a
run folder's `summary.json`:

    | run folder | figure | range |
    |---|---|---|
    | `runs/quickstart` | `eval.sampled.last` | 0.93 to 1.00 |
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from readme_commands import commands_to_run, run_all

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| (\S+) to (\S+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Figure:
    """One number that a README states."""

    run_dir: str
    name: str  # keys of summary.json, joined by dots
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    example: str
    figure: Figure
    found: float | None  # None: the summary has no such number

    @property
    def is_as_stated(self) -> bool:
        """Say whether it is within its range, bounds included."""
        return self.found is not None and self.figure.low <= self.found <= self.figure.high


def read_commands(readme: str) -> list[list[str]]:
    """Return the commands of the first code block, as words; comments are left out.

    Raises:
        ValueError: there is none.
    """
    block = _BLOCK.search(readme)
    commands = [shlex.split(line, comments=True) for line in block.group(1).splitlines()] if block else []
    if not any(commands):
        raise ValueError("the README shows no command")
    return [words for words in commands if words]


def read_figures(readme: str) -> list[Figure]:
    """Return the figures of the table.

    Raises:
        ValueError: there is none: nothing would be compared.
    """
    figures = [
        Figure(folder, name, float(low), float(high)) for folder, name, low, high in _ROW.findall(readme)
    ]
    if not figures:
        raise ValueError("the README states no figure (| `run folder` | `figure` | LOW to HIGH |)")
    return figures


def find_number(summary: Mapping[str, Any], name: str) -> float | None:
    """Return the number that `name` leads to; None where there is none."""
    value: Any = summary
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def check_example(folder: Path, root: Path = ROOT) -> list[Outcome]:
    """Run an example's commands in `root`, then compare.

    Raises:
        ValueError: the README shows no command, or states no figure.
        CalledProcessError: a command failed.
    """
    readme = (folder / "README.md").read_text(encoding="utf-8")
    figures = read_figures(readme)
    for words in read_commands(readme):
        print("+", shlex.join(words), flush=True)
        subprocess.run(_with_this_python(words), cwd=root, check=True)
    return [
        Outcome(folder.name, figure, find_number(_read_summary(root / figure.run_dir), figure.name))
        for figure in figures
    ]


def _read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _with_this_python(words: Sequence[str]) -> list[str]:
    """Return a command that takes this interpreter's programs, installed on the path or not."""
    programs = {
        "python": ["-u"],
        "torchrun": ["-m", "torch.distributed.run"],
        "megagrpo": ["-m", "megagrpo.cli"],
    }
    first, *rest = words
    return [sys.executable, *programs[first], *rest] if first in programs else list(words)


def main() -> int:
    """Check the examples; return 1 where a figure is not as stated or a command failed."""
    parser = argparse.ArgumentParser(description="run what the examples' READMEs show, compare the figures")
    parser.add_argument("examples", nargs="*", type=Path, help="folders; all where none is named")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    folders = options.examples or sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
    outcomes: list[Outcome] = []
    failed = []
    for folder in folders:
        try:
            outcomes += check_example(folder)
        except (ValueError, subprocess.CalledProcessError) as error:
            failed.append(f"{folder}: {error}")
    if not options.examples:
        failed += run_all(commands_to_run())
    for outcome in outcomes:
        figure, found = outcome.figure, "missing" if outcome.found is None else f"{outcome.found:.4g}"
        verdict = "ok" if outcome.is_as_stated else "NOT AS STATED"
        print(
            f"{outcome.example:24} {figure.name:28} {found:>10}  {figure.low:g} to {figure.high:g}  {verdict}"
        )
    for line in failed:
        print(f"FAILED {line}")
    if options.json:
        rows = [asdict(outcome) | {"is_as_stated": outcome.is_as_stated} for outcome in outcomes]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failed or not all(outcome.is_as_stated for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
