"""Results of evaluations as JSON: `evaluations/step_000010.json` for each step that was evaluated."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "evaluations"


def evaluation_file(run_dir: Path, step: int) -> Path:
    """Return the file of a step's results."""
    return run_dir / FOLDER / f"step_{step:06d}.json"


def write_evaluation(path: Path, results: Mapping[str, Any]) -> None:
    """Write results whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)
