"""A full or lost disk costs no row and no run."""

import errno
import json
import os

import pytest

from megagrpo.config.run_sections import TelemetryConfig
from megagrpo.telemetry import patient_file
from megagrpo.telemetry.patient_file import PatientFile
from megagrpo.telemetry.recorder import Recorder


@pytest.fixture
def full_disk(monkeypatch):
    """A function: how many bytes still fit; None: all."""
    write = os.pwrite
    room = {"bytes": None}

    def limited(descriptor, data, offset):
        if room["bytes"] is None:
            return write(descriptor, data, offset)
        if room["bytes"] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fits = min(len(data), room["bytes"])
        room["bytes"] -= fits
        return write(descriptor, data[:fits], offset)

    monkeypatch.setattr(patient_file.os, "pwrite", limited)
    return lambda left: room.update(bytes=left)


def test_what_does_not_fit_waits_and_no_record_is_torn(tmp_path, full_disk):
    path = tmp_path / "rows"
    path.write_bytes(b"old\n")
    file = PatientFile(path)
    full_disk(3)
    for record in (b"first\n", b"second\n"):
        file.write(record)
        assert not file.flush()
    assert file.error.errno == errno.ENOSPC and file.waiting_bytes == 13
    full_disk(None)
    assert file.flush() and file.error is None
    assert path.read_bytes() == b"old\nfirst\nsecond\n"


def test_a_folder_that_comes_back_gets_what_waited(tmp_path):
    path = tmp_path / "mount" / "rows"
    file = PatientFile(path)
    file.write(b"row\n")
    assert not file.flush()
    path.parent.mkdir()
    assert file.flush() and path.read_bytes() == b"row\n"


def test_a_run_records_every_step_though_the_disk_was_full_for_a_while(tmp_path, full_disk, capsys):
    recorder = Recorder(tmp_path, 4, TelemetryConfig(), "")
    recorder.open(None)
    recorder.step(1, {"loss": 1.0})
    full_disk(5)
    recorder.step(2, {"loss": 2.0})
    recorder.step(3, {"loss": 3.0})
    full_disk(None)
    recorder.step(4, {"loss": 4.0})
    recorder.finish(1.0, [1])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(step, float(step)) for step in (1, 2, 3, 4)]
    printed = capsys.readouterr().out
    assert printed.count("warning: jsonl can't be written now: [Errno 28] No space left on device") == 1
    assert printed.count("jsonl can be written again") == 1
    assert [
        line.split()[3].split("/")[0]
        for line in (tmp_path / "log.txt").read_text().splitlines()
        if " step " in line
    ] == list("1234")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_rewinding_drops_later_rows(tmp_path):
    recorder = Recorder(tmp_path, 9, TelemetryConfig(writers=("jsonl",)), "")
    recorder.open(None)
    for step in (1, 2, 3):
        recorder.step(step, {"loss": 0.0})
    recorder.rewind(1)
    recorder.step(2, {"loss": 5.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.0), (2, 5.0)]
