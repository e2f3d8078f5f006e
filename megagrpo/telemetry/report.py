"""`report.html`: the curves of a run, in one file that opens without a network."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.errors import UserError
from megagrpo.telemetry import names
from megagrpo.telemetry.writers import read_rows

# name -> (steps, values); None is a gap in the curve
Series = dict[str, tuple[list[int], list[float | None]]]


def write_report(run_dir: Path) -> Path:
    """Draw the metrics of the run in `run_dir` and return the path of its report.html.

    Raises:
        UserError: the folder holds no metrics.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; RUN_DIR is the folder that run.dir named")
    panels = select_panels(list(read_rows(path)))
    if not panels:
        raise UserError(f"{path}: holds no step yet")
    html = _draw(panels, title=str(run_dir))
    target = run_dir / "report.html"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, target)
    return target


def select_panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Return the curves of each panel, in the order of the page; a panel without a curve is left out."""
    curves = _curves(rows)
    panels: dict[str, Series] = {
        "Reward": {name: curve for name, curve in curves.items() if name.startswith("reward/")},
        "Evaluation": {name: curve for name, curve in curves.items() if names.evaluation_set(name)},
        "Log-prob gap, engine against actor": {
            name: curve for name, curve in curves.items() if name == names.LOGPROB_GAP
        },
        "Loss": {name: curve for name, curve in curves.items() if name.startswith("loss/")},
        "Optimizer": {name: curve for name, curve in curves.items() if name.startswith("optimizer/")},
        "Seconds": {
            name: curve
            for name, curve in curves.items()
            if name.startswith("time/") and not name.endswith("_cpu_seconds")
        },
        "CPU seconds": {
            name: curve
            for name, curve in curves.items()
            if name.startswith("time/") and name.endswith("_cpu_seconds")
        },
    }
    shown = {name for series in panels.values() for name in series}
    panels["Further metrics"] = {name: curve for name, curve in curves.items() if name not in shown}
    return {title: series for title, series in panels.items() if series}


def _curves(rows: Sequence[Mapping[str, Any]]) -> Series:
    curves: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return curves


def _draw(panels: Mapping[str, Series], title: str) -> str:
    import plotly.graph_objects as graph  # half a second that no other command pays
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        subplot_titles=list(panels),
        vertical_spacing=0.3 / len(panels),
    )
    for position, (panel, series) in enumerate(panels.items(), start=1):
        for name, (steps, values) in series.items():
            curve = graph.Scatter(
                x=steps,
                y=values,
                name=name,
                mode="lines+markers",
                legendgroup=panel,
                legendgrouptitle_text=panel,
            )
            figure.add_trace(curve, row=position, col=1)
    figure.update_xaxes(title_text="step", row=len(panels), col=1)
    figure.update_layout(title=title, height=320 * len(panels), template="plotly_white", hovermode="x")
    return figure.to_html(include_plotlyjs=True, full_html=True)
