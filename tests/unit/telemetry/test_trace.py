"""One step of a run is traced on request, with its phases by name."""

import gzip
import json

import torch

from megagrpo.telemetry.timers import PhaseTimers
from megagrpo.telemetry.trace import StepTrace


def run_steps(folder, traced, steps=3):
    notes = []
    trace = StepTrace(folder, traced, 1, notes.append)
    timers = PhaseTimers(on_enter=[trace.enter], on_leave=[trace.leave])
    for step in range(1, steps + 1):
        with trace.step(step), timers.phase("update"), timers.phase("inner"):
            torch.ones(step, 8) @ torch.ones(8, 8)
    return notes


def test_the_wanted_step_alone_is_traced_with_its_phases_and_kernels(tmp_path):
    (note,) = run_steps(tmp_path, traced=2)
    (file,) = (tmp_path / "trace").iterdir()
    assert file.name == "step_000002_rank_1.json.gz" and str(tmp_path / "trace") in note
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event}
    outer, inner, product = spans["phase: update"], spans["phase: inner"], spans["aten::mm"]
    assert outer[0] <= inner[0] <= product[0] <= product[1] <= inner[1] <= outer[1]
    assert sum(event["name"] == "phase: update" for event in events if "dur" in event) == 1


def test_a_run_that_asks_for_none_writes_none(tmp_path):
    assert run_steps(tmp_path, traced=0) == [] and not (tmp_path / "trace").exists()


def test_a_trace_that_cannot_be_written_stops_no_run(tmp_path):
    (tmp_path / "trace").write_text("a file in its place")
    (note,) = run_steps(tmp_path, traced=1)
    assert note.startswith("warning: the trace of step 1 can't be written")
