"""MLflow, the package itself on a folder: each step once under its own name, one run over all resumes."""

import sys

import pytest

from megagrpo.config.schema import TelemetryConfig
from megagrpo.errors import UserError
from megagrpo.telemetry.recorder import Recorder
from megagrpo.telemetry.writers import open_writers

CONFIG = "model: {path: m}\ndata: {source: a}\nrewards: {functions: [{name: math}]}\noptimizer: {lr: %s}\n"


@pytest.fixture
def client(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return tracking.MlflowClient()


def record(folder, last_step, steps, lr="3.0e-5"):
    recorder = Recorder(folder, 9, TelemetryConfig(writers=("jsonl", "mlflow")), CONFIG % lr)
    recorder.open(last_step)
    for step in steps:
        recorder.step(step, {"reward/mean": step / 10, "time/step_seconds": 1.0})
    recorder.finish(1.0, [1])


def runs(client):
    return client.search_runs([client.get_experiment_by_name("megagrpo").experiment_id])


def test_a_resumed_run_goes_on_in_the_same_run_and_repeats_no_step(tmp_path, client):
    record(tmp_path / "run", None, [1, 2, 3])
    record(tmp_path / "run", 2, [3, 4], lr="1.0e-5")  # the third step was not in the checkpoint
    (run,) = runs(client)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(step, step / 10) for step in (1, 2, 3, 4)]
    assert run.data.params["optimizer.lr"] == "3e-05" and run.info.run_name == "run"
    assert run.info.status == "FINISHED"


def test_a_new_run_in_the_folder_is_another_run_there(tmp_path, client):
    record(tmp_path / "run", None, [1])
    record(tmp_path / "run", None, [1])
    assert len(runs(client)) == 2


def test_what_could_not_be_sent_is_sent_with_the_next_step(tmp_path, client, monkeypatch, capsys):
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    sends = MlflowClient.log_batch
    recorder = Recorder(tmp_path / "run", 9, TelemetryConfig(writers=("jsonl", "mlflow")), CONFIG % "3.0e-5")
    recorder.open(None)

    def is_down(*arguments, **options):
        raise MlflowException("the server is down")

    monkeypatch.setattr(MlflowClient, "log_batch", is_down)
    recorder.step(1, {"reward/mean": 0.1})
    monkeypatch.setattr(MlflowClient, "log_batch", sends)
    recorder.step(2, {"reward/mean": 0.2})
    recorder.finish(1.0, [1])
    (run,) = runs(client)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2)]
    said = capsys.readouterr().out
    assert "mlflow can't be written now: MLflow: the server is down" in said
    assert "mlflow can be written again" in said


def test_without_the_package_or_an_address_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if "mlflow" in sys.modules:
        with pytest.raises(
            UserError, match="mlflow: the environment variable MLFLOW_TRACKING_URI is not set"
        ):
            open_writers(["mlflow"], tmp_path, None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    with pytest.raises(UserError, match=r"mlflow: the package is missing: pip install 'megagrpo\[mlflow\]'"):
        open_writers(["mlflow"], tmp_path, None)
