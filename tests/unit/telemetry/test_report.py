"""The report: every recorded metric is on the page, panels hold what belongs together, and it stays small."""

import base64
import gzip
import json
import random
import re
from pathlib import Path

import pytest

from megagrpo.config.load import dump_config, load_config
from megagrpo.errors import UserError
from megagrpo.telemetry import names, report
from megagrpo.telemetry.report import write_report
from megagrpo.telemetry.report_panels import PANELS, select_panels

ROW = {
    names.REWARD: 0.5,
    names.REWARD_STD: 0.2,
    names.GROUPS: 8,
    names.SIGNAL_GROUPS: 5,
    names.SOLVED_GROUPS: 1,
    names.STEP_SECONDS: 2.0,
    names.GENERATED_TOKENS: 100.0,
    names.GENERATION_SECONDS: 1.0,
    names.LOGPROB_GAP: 1e-6,
    "reward/math": 0.5,
    "own/number": 1.23456789,
}


def write_run(folder, rows, overrides=()):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        "model: {path: m}\ndata: {source: a}\nrewards: {functions: [{name: exact_match}]}\n"
    )
    (folder / "config.yaml").write_text(dump_config(load_config(folder / "run.yaml", list(overrides))))
    return folder


def data_of(page):
    packed = re.search(r'id="data">([^<]*)<', page.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def completion(step, text="so 42"):
    row = {"prompt_id": step, "index": 0, "prompt": "6 * 7", "completion": text, "reward": 1.0, "tokens": 3}
    return json.dumps(row) + "\n"


def test_the_page_holds_every_metric_and_needs_no_network(tmp_path):
    rows = [{"step": step, **ROW} for step in (1, 2)]
    page = write_report([write_run(tmp_path / "run", rows)])
    assert page == tmp_path / "run" / "report.html"
    (run,) = data_of(page)["runs"]
    assert run["steps"] == [1, 2] and set(run["metrics"]) == set(ROW)
    assert run["metrics"]["own/number"] == [1.2346, 1.2346]
    text = page.read_text()
    assert not re.search(r"""(src|href)=["']https?:""", text) and "{{" not in text.replace("{{}", "")


def test_warnings_completions_and_what_differs_from_the_defaults_are_on_it(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": 1, **ROW}], ["optimizer.lr=3e-5"])
    (folder / "warnings.jsonl").write_text('{"step": 1, "name": "disk", "text": "nearly full"}\nbroken\n')
    (folder / "completions").mkdir()
    (folder / "completions" / "step_000001.jsonl").write_text(completion(1) + "broken\n")
    data = data_of(write_report([folder]))
    (run,) = data["runs"]
    assert [warning["text"] for warning in run["warnings"]] == ["nearly full"]
    assert [(row["step"], row["set"], row["completion"]) for row in run["completions"]] == [(1, "", "so 42")]
    assert ["optimizer.lr", "3e-05 (default 1e-06)"] in data["config"]


def test_several_runs_are_told_apart_and_only_their_differences_are_listed(tmp_path):
    for name, lr in (("a", "3e-5"), ("b", "1e-5")):
        write_run(tmp_path / name / "run", [{"step": 1, **ROW}], [f"optimizer.lr={lr}", "run.steps=7"])
    page = write_report([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "both.html")
    data = data_of(page)
    assert data["title"] == "a/run against b/run"
    assert data["config"] == [["optimizer.lr", "3e-05 (default 1e-06)", "1e-05 (default 1e-06)"]]


def test_panels_keep_what_belongs_together_and_leave_out_what_is_not_there():
    panels = {panel["title"]: panel for panel in select_panels(ROW)}
    assert [curve["label"] for curve in panels["Groups by outcome"]["curves"]] == [
        "signal",
        "all right",
        "all wrong",
    ]
    assert [curve["label"] for curve in panels["Reward parts"]["curves"]] == ["math"]
    assert "Entropy" not in panels and "Evaluation" not in panels
    assert {panel["title"] for panel in panels.values()} <= {panel.title for panel in PANELS}


def test_a_held_out_set_has_its_interval():
    (panel,) = select_panels(["eval/gsm8k", "eval/gsm8k/standard_error", "eval/gsm8k/pass@4"])
    (curve,) = panel["curves"]
    assert (curve["metric"], curve["band"], curve["times"]) == (
        "eval/gsm8k",
        "eval/gsm8k/standard_error",
        1.96,
    )


def test_a_long_run_is_thinned_and_keeps_its_evaluations(tmp_path):
    rows = [{"step": step, names.REWARD: 0.5} for step in range(1, 15_001)]
    rows[4321]["eval/set"] = 0.75
    (run,) = data_of(write_report([write_run(tmp_path / "run", rows)]))["runs"]
    assert len(run["steps"]) < report.MOST_ROWS and run["steps"][-1] == 15_000
    assert run["metrics"]["eval/set"][run["steps"].index(4322)] == 0.75


def test_a_page_that_grows_too_large_drops_older_completions_first(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", [{"step": 1, **ROW}])
    (folder / "completions").mkdir()
    for step in range(1, 9):
        text = base64.b64encode(random.Random(step).randbytes(15_000)).decode()
        (folder / "completions" / f"step_{step:06d}.jsonl").write_text(completion(step, text))
    whole = write_report([folder]).stat().st_size
    monkeypatch.setattr(report, "MOST_BYTES", whole - 60_000)
    page = write_report([folder])
    steps = [row["step"] for row in data_of(page)["runs"][0]["completions"]]
    assert page.stat().st_size <= whole - 60_000 and 8 in steps and len(steps) in (2, 4)


def test_a_text_cannot_end_the_script_that_holds_it(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": 1, **ROW}])
    (folder / "completions").mkdir()
    (folder / "completions" / "step_000001.jsonl").write_text(completion(1, "</script><script>alert(1)"))
    assert "alert(1)" not in write_report([folder]).read_text()


def test_a_run_without_a_step_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds no step yet"):
        write_report([write_run(tmp_path / "run", [])])


@pytest.mark.parametrize(
    "line",
    ["\udcff{", "[" * 100_000, "[1]", '{"a": 1}', '{"step": "x"}', '{"step": 2, "reward/mean": "high"}'],
)
def test_a_damaged_row_costs_no_report(tmp_path, line):
    folder = write_run(tmp_path / "run", [{"step": 1, **ROW}])
    with (folder / "metrics.jsonl").open("ab") as rows:
        rows.write(line.encode(errors="surrogateescape") + b"\n")
    (folder / "warnings.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n")
    (run,) = data_of(write_report([folder]))["runs"]
    assert run["steps"][0] == 1 and run["metrics"][names.REWARD][0] is not None


def test_what_is_no_file_costs_no_report(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": 1, **ROW}])
    for name in ("warnings.jsonl", "completions/step_000001.jsonl"):
        (folder / name).mkdir(parents=True)
    assert data_of(write_report([folder]))["runs"][0]["completions"] == []


@pytest.mark.parametrize("place", ["a folder", "/dev/full/report.html", "/proc/report.html"])
def test_a_page_that_can_not_be_written_is_one_line_and_leaves_nothing(tmp_path, place):
    folder = write_run(tmp_path / "run", [{"step": 1, **ROW}])
    target = tmp_path / "taken.html" if place == "a folder" else Path(place)
    if place == "a folder":
        target.mkdir()
    with pytest.raises(UserError, match=rf"^{target}: can't be written: [^\n]+; --out names another$"):
        write_report([folder], target)
    assert not list(tmp_path.glob("*.tmp"))
