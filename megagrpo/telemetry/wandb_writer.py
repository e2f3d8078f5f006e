"""Weights & Biases: `telemetry.writers: [jsonl, wandb]`. Project, entity, mode and key are those of its own
environment variables (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, WANDB_API_KEY).
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.config.differences import read_settings
from megagrpo.errors import UserError

ID_FILE = "wandb_id"  # in the run folder: a resumed run goes on in the same W&B run
DEFAULT_PROJECT = "megagrpo"


class WandbWriter:
    """One W&B run per run folder, with the names of `metrics.jsonl`.

    W&B takes each step once, in ascending order: what a resumed run repeats is left out by it.
    """

    def __init__(self, run_dir: Path, last_step: int | None = None):
        """Raises UserError where the package is not installed."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "telemetry.writers: wandb: the package is missing: pip install 'megagrpo[wandb]'"
            ) from error
        id_file = run_dir / ID_FILE
        if last_step is None or not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run_dir, self._has_config = run_dir, False
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            name=run_dir.resolve().name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run_dir),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one row over; W&B keeps what it can't send yet."""
        if not self._has_config and (settings := read_settings(self._run_dir)) is not None:
            self._run.config.update(settings, allow_val_change=True)
            self._has_config = True
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what waits."""
        self._run.finish()
