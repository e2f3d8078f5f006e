"""`megagrpo show`: a run's completions in a terminal, whole groups in the order that is asked for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from megagrpo.errors import UserError
from megagrpo.registry import suggestion
from megagrpo.supervision.redaction import visible
from megagrpo.telemetry.completions import FOLDER, read_completions

Row = Mapping[str, Any]
_SHOWN_CHARACTERS = 1200  # where a longer text is cut


def _reward(row: Row) -> float:
    return row.get("reward") or 0.0


ORDERS: dict[str, Callable[[Sequence[Row]], float]] = {
    "prompt": lambda group: group[0]["prompt_id"],
    "best": lambda group: -max(map(_reward, group)),
    "worst": lambda group: min(map(_reward, group)),
    "longest": lambda group: -max(row["tokens"] for row in group),
    "mixed": lambda group: min(map(_reward, group)) - max(map(_reward, group)),
    "changed": lambda group: group[0]["prompt_id"],
}


def show_completions(
    run_dir: Path,
    step: int | None = None,
    held_out: str | None = None,
    order: str = "prompt",
    text: str = "",
    count: int = 3,
    console: Console | None = None,
) -> None:
    """Print groups of one step.

    Args:
        run_dir: folder of the run.
        step: None: the newest with completions.
        held_out: evaluation set; None: training.
        order: one of ORDERS; `changed`: completions whose reward is not that of the step before, both shown.
        text: in prompt or completion, in any case of letters.
        count: groups that are printed.
        console: None: standard output.

    Raises:
        UserError: there are no such completions; those there are, are named.
    """
    if order not in ORDERS:
        raise UserError(f"--order {order}: must be one of {', '.join(ORDERS)}{suggestion(order, [*ORDERS])}")
    rows = list(read_completions(run_dir))
    if not rows:
        raise UserError(f"{run_dir / FOLDER}: no completions; telemetry.completions_every writes them")
    wanted = [row for row in rows if row["set"] == (held_out or "")]
    if not wanted:
        sets = ", ".join(sorted({row["set"] or "training" for row in rows}))
        raise UserError(f"--held-out {held_out}: no such set here; there are {sets}")
    steps = sorted({row["step"] for row in wanted})
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(
            f"--step {step}: no completions of it; there are those of {', '.join(map(str, steps))}"
        )
    chosen = _groups(row for row in wanted if row["step"] == step)
    if order == "changed":
        chosen = [changed for group in chosen if (changed := _changes(group, wanted))]
    chosen = [group for group in chosen if any(_has(row, text) for row in group)]
    console = console or Console(highlight=False)
    for group in sorted(chosen, key=ORDERS[order])[:count]:
        console.print(_panel(group))
    what = "training prompts" if held_out is None else held_out
    console.print(f"step {step}, {what}: {min(count, len(chosen))} of {len(chosen)} groups")


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: row["prompt_id"])]


def _changes(group: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return the completions of a group whose reward has changed, each after that of the step before."""
    found: list[Row] = []
    for row in group:
        earlier = [
            other
            for other in rows
            if other["step"] < row["step"]
            and (other["prompt_id"], other["index"]) == (row["prompt_id"], row["index"])
        ]
        if earlier and _reward(earlier[-1]) != _reward(row):
            found += [earlier[-1], row]
    return found


def _has(row: Row, text: str) -> bool:
    return text.lower() in f"{row['prompt']}\n{row['completion']}".lower()


def _panel(group: Sequence[Row]) -> Panel:
    first = group[0]
    columns = "  ".join(f"{name}: {value}" for name, value in (first.get("columns") or {}).items())
    parts = [Text(_cut(first["prompt"])), Text(visible(columns), style="dim")]
    for row in group:
        facts = [f"{name} {value}" for name, value in row["parts"].items()]
        facts += [f"{row['tokens']} tokens", row["finish_reason"], f"step {row['step']}"]
        if row["outcome"] != "ok":
            facts.append(f"{row['outcome']}: {row['detail']}")
        colour = "green" if _reward(row) == max(map(_reward, group)) and _reward(row) > 0 else "red"
        parts.append(
            Text.assemble(
                "\n", (f"{row['reward']}", f"bold {colour}"), (visible("  " + "  ".join(facts)), "dim")
            )
        )
        parts.append(Text(_cut(row["completion"])))
    return Panel(Group(*parts), title=f"prompt {first['prompt_id']}", title_align="left")


def _cut(text: str) -> str:
    return visible(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ...")
