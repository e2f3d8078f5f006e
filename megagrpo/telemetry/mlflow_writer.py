"""MLflow: `telemetry.writers: [jsonl, mlflow]`. Server, experiment and credentials are those of its own
environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_TRACKING_TOKEN).
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.config.differences import read_settings
from megagrpo.errors import UserError
from megagrpo.telemetry import names

ID_FILE = "mlflow_run_id"  # in the run folder: a resumed run goes on in the same MLflow run
DEFAULT_EXPERIMENT = "megagrpo"
BATCH = 100  # parameters that MLflow takes at once; of metrics it takes 1,000
LONGEST_VALUE = 6000  # characters of a parameter


class MlflowWriter:
    """One MLflow run per run folder, with the names of `metrics.jsonl`.

    MLflow keeps a step as often as it is told: what a resumed run repeats is left out here. It lets no
    parameter change: those of a resumed run are what they were at its first start.
    """

    def __init__(self, run_dir: Path, last_step: int | None = None):
        """Raises UserError where the package or its server's address is missing."""
        try:
            import mlflow.entities
            import mlflow.exceptions
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UserError(
                "telemetry.writers: mlflow: the package is missing: pip install 'megagrpo[mlflow]'"
            ) from error
        if "MLFLOW_TRACKING_URI" not in os.environ:
            raise UserError(
                "telemetry.writers: mlflow: the environment variable MLFLOW_TRACKING_URI is not set; it "
                "names the server, as in http://127.0.0.1:5000"
            )
        self._entities, self._errors = mlflow.entities, mlflow.exceptions.MlflowException
        self._run_dir, self._has_config = run_dir, False
        self._waiting: list[Any] = []  # what could not be sent
        id_file = run_dir / ID_FILE
        try:
            self._client = MlflowClient()
            if last_step is None or not id_file.exists():
                id_file.write_text(self._create_run(), encoding="utf-8")
            self._run_id = id_file.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, status="RUNNING")
            self._known = set(self._client.get_run(self._run_id).data.params)
            sent = self._client.get_metric_history(self._run_id, names.STEP_SECONDS)
        except self._errors as error:
            raise OSError(f"MLflow: {error}") from error
        self._last_step = max((metric.step for metric in sent), default=-1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one row, after those that could not be sent before."""
        if step > self._last_step:
            now = int(time.time() * 1000)
            self._waiting += [
                self._entities.Metric(name, value, now, step) for name, value in metrics.items()
            ]
        self._send()

    def close(self) -> None:
        """Send what waits, and end the run."""
        self._send()
        self._ask(self._client.set_terminated, self._run_id)

    def _create_run(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        return self._client.create_run(number, run_name=self._run_dir.resolve().name).info.run_id

    def _send(self) -> None:
        if not self._has_config and (settings := read_settings(self._run_dir)) is not None:
            params = [
                self._entities.Param(place, value[:LONGEST_VALUE])
                for place, value in settings.items()
                if place not in self._known
            ]
            for first in range(0, len(params), BATCH):
                self._ask(self._client.log_batch, self._run_id, params=params[first : first + BATCH])
            self._has_config = True
        while self._waiting:
            self._ask(self._client.log_batch, self._run_id, metrics=self._waiting[:BATCH])
            del self._waiting[:BATCH]

    def _ask(self, call: Any, *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except self._errors as error:
            raise OSError(f"MLflow: {error}") from error
