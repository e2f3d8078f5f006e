"""Results of an evaluation as a file and as a table; two of them compared, prompt by prompt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megagrpo.errors import UserError
from megagrpo.evaluation.outcomes import SetOutcome
from megagrpo.telemetry.evaluation_files import FOLDER

FORMAT = 1
PLAIN_WIDTH = 160  # columns of a table where there is no terminal


def describe_results(outcomes: Sequence[SetOutcome], **about: Any) -> dict[str, Any]:
    """Return the results of all sets as JSON holds them, with what they are `about` (model, step)."""
    return {"format": FORMAT, **about, "sets": {each.name: each.describe() for each in outcomes}}


def read_results(path: Path) -> dict[str, Any]:
    """Return the results in a file, or those of the newest evaluation of a run folder.

    Raises:
        UserError: there are none, or it is another file.
    """
    file = path
    if path.is_dir():
        files = sorted((path / FOLDER).glob("*.json"))
        if not files:
            raise UserError(f"--compare: {path}: has no {FOLDER}/*.json, which runs and evaluations write")
        file = files[-1]
    try:
        results = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"--compare: {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"--compare: {file}: no results of an evaluation: {error}") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT or "sets" not in results:
        raise UserError(f"--compare: {file}: no results of an evaluation (format {FORMAT})")
    return results


def print_table(table: Table) -> None:
    """Print a table, in full width where no terminal bounds it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(table)


def build_table(results: Mapping[str, Any]) -> Table:
    """Return a row for each metric of each set, and of each source of a set that has several."""
    table = Table(title=f"evaluation of {results.get('model', '?')}")
    for heading in ("set", "source", "prompts", "metric"):
        table.add_column(heading)
    for heading in ("value", "95 % interval"):
        table.add_column(heading, justify="right")
    for name, found in results["sets"].items():
        sources = found["sources"] if len(found["sources"]) > 1 else {}
        counts = {source: sum(each["source"] == source for each in found["prompts"]) for source in sources}
        parts = [("all", len(found["prompts"]), found["metrics"])]
        parts += [(source or "none", counts[source], metrics) for source, metrics in sources.items()]
        for source, count, metrics in parts:
            for metric, told in metrics.items():
                interval = f"{told['low']:.3f} to {told['high']:.3f}" if "low" in told else ""
                table.add_row(name, source, str(count), metric, f"{told['value']:.3f}", interval)
        table.add_row(name, "all", "", "tokens", f"{found['tokens']['mean']:.1f}", "")
        table.add_row(name, "all", "", "cut by length", f"{found['cut_by_length_fraction']:.3f}", "")
        if found["failed"]:
            table.add_row(name, "all", "", "not scored", str(sum(found["failed"].values())), "")
        if contaminated := found.get("contamination", {}).get("prompts"):
            table.add_row(name, "all", str(contaminated), "in the training prompts", "", "")
    return table
