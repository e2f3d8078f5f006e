"""Writes docs/reference from the code: fields, metrics and commands. A test compares what is there with it.

python tools/make_reference.py [FOLDER]
"""

import sys
from itertools import groupby
from pathlib import Path

import typer

from megagrpo.cli import app
from megagrpo.planning.config_help import LISTS, merged_fields
from megagrpo.planning.metric_dictionary import declarations

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE = "Made by `python tools/make_reference.py` from the code; do not edit.\n"


def configuration() -> str:
    """Return the page of all fields, a table a section."""
    parts = [
        "# Configuration\n",
        MADE,
        "`base: other.yaml` chains files; `section.field=value` on the command line wins. `N` is a place in "
        "a list. Names that a field takes: "
        + ", ".join(f"`megagrpo config {name}`" for name in LISTS)
        + ".\n",
    ]
    for section, fields in groupby(merged_fields(), key=lambda field: field.place.split(".")[0]):
        parts += [f"## {section}\n", "| field | takes | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            meaning = field.description + (f" ({field.kinds} only)" if field.kinds else "")
            parts.append(_row(f"`{field.place}`", field.type, f"`{field.default}`", meaning))
        parts.append("")
    return "\n".join(parts)


def metrics() -> str:
    """Return the page of all metrics."""
    parts = ["# Metrics\n", MADE, "`*` stands for a name of the run's: a set, a reward, a phase.\n"]
    parts += ["| metric | unit | over | meaning | healthy | otherwise |", "|---|---|---|---|---|---|"]
    for entry in declarations():
        parts.append(
            _row(
                f"`{entry.pattern}`", entry.unit, entry.reduction, entry.meaning, entry.healthy, entry.advice
            )
        )
    return "\n".join([*parts, ""])


def commands() -> str:
    """Return the page of all commands with their options."""
    parts = ["# Commands\n", MADE]
    for name, command in typer.main.get_command(app).commands.items():
        parts += [f"## megagrpo {name}\n", f"{(command.help or '').strip()}\n"]
        parts += ["| argument or option | meaning |", "|---|---|"]
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            shown = ", ".join(parameter.opts) if is_option else (parameter.metavar or parameter.name.upper())
            parts.append(_row(f"`{shown}`", getattr(parameter, "help", None) or ""))
        parts.append("")
    return "\n".join(parts)


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "commands.md": commands}


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(str(cell).replace('|', chr(92) + '|').split()) for cell in cells)} |"


def main() -> None:
    """Write all pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
