"""`report.html`: a run, or several side by side, in one file that opens without a network."""

import base64
import contextlib
import gzip
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.config.differences import differences
from megagrpo.config.load import load_config
from megagrpo.errors import UserError
from megagrpo.telemetry import names
from megagrpo.telemetry.activity import format_seconds
from megagrpo.telemetry.completions import read_completions
from megagrpo.telemetry.report_panels import select_panels
from megagrpo.telemetry.warnings_file import read_warnings
from megagrpo.telemetry.writers import read_rows

MOST_BYTES = 6_000_000
MOST_ROWS = 6_000  # a longer run is thinned: no screen has so many columns
_DIGITS = 5  # significant digits of a number on the page
_PAGE = Path(__file__).parent / "report_page"


def write_report(run_dirs: Sequence[Path], target: Path | None = None) -> Path:
    """Write the page of one run, or of several that are compared, and return its path.

    Args:
        run_dirs: folders of runs, the first one leads.
        target: file to write; None: report.html in the first folder.

    Raises:
        UserError: a folder holds no metrics, or the page can't be written.
    """
    runs = [_gather(folder, name) for folder, name in zip(run_dirs, _short_names(run_dirs), strict=True)]
    html = build_page(runs)
    while len(html) > MOST_BYTES and any(run["completions"] for run in runs):
        for run in runs:
            run["completions"] = _fewer_steps(run["completions"])
        html = build_page(runs)
    target = target or run_dirs[0] / "report.html"
    temporary = target.with_suffix(".tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"{target}: can't be written: {error.strerror or error}; --out names another"
        ) from error
    return target


def build_page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of what `_gather` has found of each run."""
    from plotly.offline import get_plotlyjs  # half a second that no other command pays

    available = {name for run in runs for name in run["metrics"]}
    title = " against ".join(run["name"] for run in runs)
    data = {
        "title": title,
        "runs": runs,
        "panels": select_panels(available),
        "config": _compare_configs(runs),
    }
    parts = {
        "title": title.replace("<", "&lt;"),
        "css": (_PAGE / "page.css").read_text(encoding="utf-8"),
        "js": (_PAGE / "page.js").read_text(encoding="utf-8"),
        "data": _pack(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
        "plotly": _pack(get_plotlyjs()),
    }
    page = (_PAGE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def _pack(text: str) -> str:
    """Return text as the page unpacks it: a third of its size."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _gather(run_dir: Path, name: str) -> dict[str, Any]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; RUN_DIR is the folder that run.dir named")
    rows = [{key: value for key, value in row.items() if _is_number(value)} for row in read_rows(path)]
    if not rows:
        raise UserError(f"{path}: holds no step yet")
    kept = _thin(rows)
    metrics = sorted({key for row in kept for key in row} - {"step"})
    return {
        "name": name,
        "steps": [row["step"] for row in kept],
        "metrics": {key: [_rounded(row.get(key)) for row in kept] for key in metrics},
        "cards": _cards(run_dir, rows),
        "warnings": read_warnings(run_dir),
        "config": _config_of(run_dir),
        "completions": list(read_completions(run_dir)),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _thin(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep every k-th row, the last one, and those with an evaluation."""
    every = -(-len(rows) // MOST_ROWS)
    return [
        row
        for place, row in enumerate(rows)
        if place % every == 0 or place == len(rows) - 1 or any(map(names.evaluation_set, row))
    ]


def _rounded(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def _cards(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return what is read first."""

    def path_of(name: str) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    cards = [("steps", str(rows[-1]["step"]), "")]
    if rewards := path_of(names.REWARD):
        cards.append(("reward, first to last", f"{rewards[0]:.3f} → {rewards[-1]:.3f}", ""))
    for key in sorted({key for row in rows for key in row if names.evaluation_set(key)}):
        values = path_of(key)
        if values:
            label = f"held-out {names.evaluation_set(key)}"
            cards.append((label, f"{values[0]:.3f} → {values[-1]:.3f}", f"best {max(values):.3f}"))
    seconds = path_of(names.STEP_SECONDS)
    if seconds:
        cards.append(("seconds a step", f"{sum(seconds) / len(seconds):.3g}", "without evaluation"))
    if gaps := path_of(names.LOGPROB_GAP):
        cards.append(("largest log-prob gap", f"{max(gaps):.1e}", "engine against actor"))
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        peak = max(summary["peak_rss_bytes"])
        cards.append(("run time", format_seconds(summary["wall_seconds"]), ""))
        cards.append(("memory of a rank", f"{peak / 2**30:.2f} GiB", "peak, resident"))
    except (OSError, ValueError, KeyError, TypeError):
        cards.append(("state", "not finished", "no summary.json"))
    return [{"name": name, "value": value, "more": more} for name, value, more in cards]


def _config_of(run_dir: Path) -> dict[str, str]:
    """Return what differs from the defaults; nothing where the file is of another version."""
    try:
        lines = differences(load_config(run_dir / "config.yaml", []))
    except (UserError, OSError):
        return {}
    return dict(line.split(": ", 1) for line in lines)


def _compare_configs(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row a field: what differs between runs, or from the defaults where there is one run."""
    places = list(dict.fromkeys(place for run in runs for place in run["config"]))
    table = [[place, *(run["config"].get(place, "default") for run in runs)] for place in places]
    return table if len(runs) == 1 else [row for row in table if len(set(row[1:])) > 1]


def _fewer_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop every second step's completions, never the newest; all of them where one step is left."""
    steps = sorted({row["step"] for row in rows}, reverse=True)
    kept = set(steps[::2]) if len(steps) > 1 else set()
    return [row for row in rows if row["step"] in kept]


def _short_names(run_dirs: Iterable[Path]) -> list[str]:
    """Return the folders' names, with as much of their paths as tells them apart."""
    paths = [folder.resolve() for folder in run_dirs]
    depth = 1
    while depth < 8 and len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]
