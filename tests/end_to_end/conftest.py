"""Whole runs on the quickstart model. One launch carries many runs; its imports cost more than the runs."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(scope="session")
def rows_of():
    """A function: run folder -> rows of its metrics.jsonl, the wall-clock ones left out."""

    def read(folder: Path) -> list[dict]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]

    return read


@pytest.fixture(scope="session")
def run_all(tmp_path_factory):
    """A function: (ranks, {name: overrides}) -> {name: run folder}; all runs in one launch, by `worker`."""
    from small_runs import QUICKSTART, SMALL
    from torchrun_launch import run_torchrun

    def launch(
        ranks: int, runs: dict[str, list[str]], root: Path | None = None, worker: str = "runs_worker.py"
    ) -> dict[str, Path]:
        root = root or tmp_path_factory.mktemp("runs")
        folders = {name: root / name for name in runs}
        jobs = [
            [QUICKSTART, [*SMALL, f"run.dir={folders[name]}", *overrides]] for name, overrides in runs.items()
        ]
        run_torchrun(ranks, worker, json.dumps(jobs), timeout_seconds=400)
        return folders

    return launch
