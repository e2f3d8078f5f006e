"""The files that a run leaves: each step once, a summary of all of it, lines that can be read."""

import io
import json
import math

import pytest

from megagrpo.config.run_sections import TelemetryConfig
from megagrpo.errors import UserError
from megagrpo.telemetry import names, writers
from megagrpo.telemetry.activity import Activity
from megagrpo.telemetry.display import Display
from megagrpo.telemetry.progress import Progress
from megagrpo.telemetry.recorder import Recorder
from megagrpo.telemetry.step_line import format_step
from megagrpo.telemetry.timers import PhaseTimers
from megagrpo.telemetry.writers import JsonlWriter, TensorboardWriter, open_writers, read_rows


def write_steps(writer, steps):
    for step in steps:
        writer.write(step, {"loss": float(step)})


def test_resume_records_no_step_twice(tmp_path):
    first = JsonlWriter(tmp_path)
    write_steps(first, [1, 2, 3, 4])
    first.close()
    resumed = JsonlWriter(tmp_path, last_step=2)
    write_steps(resumed, [3, 4, 5])
    resumed.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_line_that_a_crash_cut_off_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    writer = JsonlWriter(tmp_path, last_step=1)
    write_steps(writer, [2])
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_byte_that_is_no_text_costs_neither_the_resume_nor_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        b'{"step": 1, "a": 1.0}',
        b'{"step": 2, "\xff": 2.0}',
        b'{"st\xffep": 3}',
        b'{"step": 4, "a": 4.0}',
    ]
    path.write_bytes(b"\n".join(rows) + b"\n")
    JsonlWriter(tmp_path, last_step=4).close()
    assert path.read_bytes() == b"\n".join([rows[0], rows[1], rows[3]]) + b"\n"
    assert [row["step"] for row in read_rows(path)] == [1, 2, 4]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"\n".join(rows) + b"\n"


def test_a_clock_that_was_set_back_hides_no_step_from_tensorboard(tmp_path, monkeypatch):
    """It reads files in the order of their names, and takes steps of a later one for those that count."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for last_step, steps in ((None, [1, 2, 3]), (3, [4, 5])):
        writer = TensorboardWriter(tmp_path, last_step)
        write_steps(writer, steps)
        writer.close()
        monkeypatch.setattr(writers.time, "time_ns", lambda: 10**18)  # in 2001
        monkeypatch.setattr(writers.time, "time", lambda: 1e9)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]


def recorder_of(folder, last_step, last_row=None):
    recorder = Recorder(folder, 9, TelemetryConfig(writers=("jsonl",)), "run: {}\n")
    recorder.open(last_step, last_row)
    return recorder


def test_a_row_that_a_crash_tore_is_written_again_from_the_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    recorder_of(tmp_path, 2, {"a": 2.0}).step(3, {"a": 3.0})
    assert [row["a"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]
    recorder_of(tmp_path, 2, {"a": 9.0})
    assert [row["a"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1.0, 2.0]


def test_a_new_run_moves_the_records_of_an_earlier_one_aside(tmp_path, capsys):
    for run in range(2):
        recorder = recorder_of(tmp_path, None)
        recorder.step(0, {"a": float(run)})
        recorder.finish(1.0, [1])
    recorder_of(tmp_path, None)
    for run in range(2):
        folder = tmp_path / f"earlier_{run + 1}"
        assert [row["a"] for row in read_rows(folder / "metrics.jsonl")] == [float(run)]
        assert (folder / "summary.json").exists() and (folder / "log.txt").exists()
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "summary.json").exists()
    assert f"now in {tmp_path / 'earlier_2'}" in capsys.readouterr().out


def test_a_new_run_starts_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    JsonlWriter(tmp_path, None).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rows_are_on_disk_as_soon_as_they_are_written_and_are_strict_json(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write(1, {"loss": math.nan, "gap": math.inf, "reward": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"step": 1, "loss": None, "gap": None, "reward": 0.5}


def test_an_unknown_writer_names_the_known_ones(tmp_path):
    with pytest.raises(
        UserError,
        match=r"is called 'jsnl'; did you mean jsonl\?; there are jsonl, mlflow, tensorboard, wandb",
    ):
        open_writers(["jsnl"], tmp_path, None)


def test_tensorboard_shows_the_configuration_and_the_hyperparameters(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    text = (
        "model: {path: m}\ndata: {source: a}\nrewards: {functions: [{name: math}]}\noptimizer: {lr: 3.0e-5}\n"
    )
    run_dir = tmp_path / "run"
    recorder = Recorder(run_dir, 9, TelemetryConfig(writers=("jsonl", "tensorboard")), text)
    recorder.open(None)
    recorder.step(1, {"reward/mean": 0.5})
    recorder.finish(1.0, [1])
    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    (shown,) = events.Tensors("config")
    assert shown.tensor_proto.string_val[0].decode() == "".join(f"    {line}\n" for line in text.splitlines())
    data = HParamsPluginData.FromString(events.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    assert data.session_start_info.hparams["optimizer.lr"].string_value == "3e-05"


def test_tensorboard_hides_the_steps_that_a_resume_repeats(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for last_step, steps in ((None, [1, 2, 3]), (1, [2, 3])):
        writer = open_writers(["tensorboard"], tmp_path, last_step)["tensorboard"]
        write_steps(writer, steps)
        writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


def test_phases_add_up_until_they_are_taken(monkeypatch):
    wall, cpu = iter([0.0, 1.5, 10.0, 12.0]), iter([0.0, 1.0, 5.0, 5.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(wall))
    monkeypatch.setattr("time.process_time", lambda: next(cpu))
    seen, left, syncs = [], [], []
    timers = PhaseTimers(
        synchronize=lambda: syncs.append(1),
        on_enter=[seen.append],
        on_leave=[lambda *phase: left.append(phase)],
    )
    with timers.phase("update"):
        pass
    with pytest.raises(RuntimeError), timers.phase("update"):
        raise RuntimeError
    assert timers.wall_seconds("update") == 3.5
    assert timers.take() == {"time/update_seconds": 3.5, "time/update_cpu_seconds": 1.5}
    assert timers.take() == {}
    assert (seen, len(syncs)) == (["update", "update"], 4)
    assert left == [("update", 1.5), ("update", 2.0)]


METRICS = {
    names.REWARD_STD: 0.3149,
    names.GROUPS: 32,
    names.SIGNAL_GROUPS: 21,
    names.LENGTH: 512.4,
    names.CUT_FRACTION: 0.031,
    names.ENTROPY: 0.312,
    names.REFERENCE_KL: 0.0123,
    names.CLIP_FRACTION: 0.002,
    names.REWARD: 0.41234,
    "eval/held_out": 0.38,
    "eval/held_out/tokens": 5.0,
    names.LOSS: -0.0012,
    names.GRAD_NORM: 1.2034,
    names.LOGPROB_GAP: 1.2e-6,
    names.GENERATED_TOKENS: 500.0,
    names.STEP_SECONDS: 0.5,
}
OWN = {name: value for name, value in METRICS.items() if not name.startswith("eval/")}
LINE = (
    "step   3/100  reward 0.412 ±0.31  signal 21/32  len 512  cut 3%  ent 0.312  kl 1.2e-02  grad 1.20"
    "  clip 0.2%  loss -1.2e-03  gap 1e-06  1000 tok/s  0.50 s"
)
LINE_OF_100_COLUMNS = (
    "step   3/100  reward 0.412 ±0.31  signal 21/32  len 512  cut 3%  ent 0.312  1000 tok/s  0.50 s"
)


def test_a_step_is_one_line():
    assert format_step(3, 100, OWN) == LINE
    assert format_step(3, 100, {names.REWARD: 1.0}) == "step   3/100  reward 1.000"
    assert format_step(3, 100, {"eval/held_out": 0.38}) == "step   3/100  eval held_out 0.380"


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_line_fits_its_width_and_keeps_reward_and_seconds(width):
    line = format_step(3, 100, OWN, width)
    assert len(line) <= width and "reward 0.412" in line and "0.50 s" in line
    assert format_step(3, 100, OWN, 100) == LINE_OF_100_COLUMNS


def test_a_loss_is_shown_only_where_clipping_gives_it_a_meaning():
    assert "loss" not in format_step(3, 100, OWN | {names.CLIP_FRACTION: 0.0})


def test_without_a_terminal_the_line_is_plain_and_also_in_the_log(tmp_path):
    screen = io.StringIO()
    progress = Progress(tmp_path, 100, Display(Activity(100), file=screen))
    progress.note("resumed after step 2")
    progress.step(3, OWN)
    progress.close()
    assert screen.getvalue() == f"resumed after step 2\n{LINE_OF_100_COLUMNS}\n"
    logged = [line[len("2025-01-01 00:00:00 ") :] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert logged == ["resumed after step 2", LINE]


def test_a_steps_numbers_come_before_its_evaluation_and_once(tmp_path, capsys):
    recorder = recorder_of(tmp_path, None)
    recorder.show(3, OWN)
    recorder.step(3, METRICS)
    recorder.close()
    shown, evaluated = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert "reward" in shown and "eval" not in shown
    assert evaluated == "step 3/9  eval held_out 0.380"
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["eval/held_out"] == 0.38 and row[names.REWARD] == 0.41234


OWN_WRITER = """
class Mine:
    def __init__(self, run_dir, last_step):
        self.file = (run_dir / "mine.txt").open("a")
    def write(self, step, metrics):
        self.file.write(f"{step} {metrics['reward/mean']}\\n")
    def close(self):
        self.file.close()
class Half:
    def __init__(self, run_dir, last_step): ...
    def write(self, step): ...
class Other:
    def write(self, step, metrics): ...
    def close(self): ...
"""


def test_a_writer_of_the_users_gets_every_step(tmp_path):
    (tmp_path / "writers.py").write_text(OWN_WRITER)
    config = TelemetryConfig(writers=("jsonl", f"{tmp_path}/writers.py:Mine"))
    recorder = Recorder(tmp_path / "run", 2, config, "")
    recorder.open(None)
    for step in (1, 2):
        recorder.step(step, {"reward/mean": step / 2})
    recorder.finish(1.0, [1])
    assert (tmp_path / "run" / "mine.txt").read_text() == "1 0.5\n2 1.0\n"
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Half", r"writers.py:Half: is no metrics writer: class Half lacks close\(\)"),
        ("Other", r"writers.py:Other: is no metrics writer: it is called with \(run_dir, last_step\)"),
    ],
)
def test_a_writer_without_its_contract_is_named_in_one_line(tmp_path, name, message):
    (tmp_path / "writers.py").write_text(OWN_WRITER)
    with pytest.raises(UserError, match=message) as caught:
        open_writers([f"{tmp_path}/writers.py:{name}"], tmp_path, None)
    assert "\n" not in str(caught.value)


def test_metrics_jsonl_can_not_be_left_out():
    with pytest.raises(ValueError, match="jsonl must be one of them"):
        TelemetryConfig(writers=("tensorboard",))
