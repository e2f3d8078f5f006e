"""Weights & Biases gets each step under its own name, and a resumed run goes on in the same W&B run.

The calls are those of wandb's documentation (init, config.update, log, finish). One test uses the package
itself, offline, where it is installed.
"""

import sys
from types import SimpleNamespace

import pytest

from megagrpo.config.schema import TelemetryConfig
from megagrpo.errors import UserError
from megagrpo.telemetry.recorder import Recorder
from megagrpo.telemetry.writers import open_writers

CONFIG = (
    "model: {path: m}\ndata: {source: a}\nrewards: {functions: [{name: math}]}\noptimizer: {lr: 3.0e-5}\n"
)


@pytest.fixture
def wandb(monkeypatch):
    """A package that notes what it is told."""
    told = SimpleNamespace(inits=[], logs=[], config={}, finished=0)

    def finish():
        told.finished += 1

    def init(**options):
        told.inits.append(options)
        return SimpleNamespace(
            log=lambda row, step: told.logs.append((step, row)),
            config=SimpleNamespace(update=lambda values, **options: told.config.update(values)),
            finish=finish,
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return told


def record(folder, last_step, steps):
    recorder = Recorder(folder, 9, TelemetryConfig(writers=("jsonl", "wandb")), CONFIG)
    recorder.open(last_step)
    for step in steps:
        recorder.step(step, {"reward/mean": step / 10})
    recorder.finish(1.0, [1])


def test_a_resumed_run_goes_on_in_the_same_run_and_a_new_one_does_not(tmp_path, wandb):
    record(tmp_path / "run", None, [1, 2])
    record(tmp_path / "run", 2, [3])
    record(tmp_path / "run", None, [1])
    first, resumed, anew = (each["id"] for each in wandb.inits)
    assert first == resumed != anew
    assert {(each["name"], each["project"]) for each in wandb.inits} == {("run", "megagrpo")}
    assert wandb.logs == [(step, {"reward/mean": step / 10}) for step in (1, 2, 3, 1)]
    assert wandb.config["optimizer.lr"] == "3e-05" and wandb.finished == 3


def test_without_the_package_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb: the package is missing: pip install 'megagrpo\[wandb\]'"):
        open_writers(["wandb"], tmp_path, None)


def test_the_package_itself_takes_what_it_is_told(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    record(tmp_path / "run", None, [1, 2])
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
