"""The audit tells false accepts from false rejects, and the built-in rewards pass it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools/audit_reward.py"


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit_reward", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_reward"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("reward", "least"),
    [
        ("math", 300),
        ("code", 60),
        *((name, 40) for name in ("format", "exact_match", "choice", "length", "repetition", "language")),
    ],
)
def test_a_built_in_reward_misjudges_none_of_its_cases(audit, tmp_path, reward, least):
    assert audit.main([reward, "--json", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["correct", "incorrect", "malformed", "adversarial", "all"]
    assert rows[-1]["cases"] == sum(row["cases"] for row in rows[:-1]) >= least
    assert rows[-1]["false_accepts"] == rows[-1]["failed"] == 0
    assert rows[-1]["false_rejects"] <= 0.02 * rows[0]["cases"]


@pytest.mark.parametrize("reward", ["judge", "reward_model"])
def test_a_reward_that_asks_an_endpoint_scores_no_answer_that_is_none(audit, tmp_path, reward):
    """What can't be read is a counted failure, worth 0 here."""
    assert audit.main([reward, "--json", str(tmp_path / "rows.jsonl")]) == 0
    rows = {
        each["kind"]: each for each in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    }
    assert rows["all"]["cases"] >= 40
    assert rows["all"]["false_accepts"] == rows["all"]["false_rejects"] == 0
    assert rows["correct"]["failed"] == rows["incorrect"]["failed"] == 0
    assert rows["malformed"]["failed"] == rows["malformed"]["cases"]


def test_misjudged_cases_are_counted_and_shown(audit, tmp_path, capsys):
    (tmp_path / "lenient.py").write_text(
        "def reward(completions, answer):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    )
    cases = [
        {"text": "12", "want": 1.0, "columns": {"answer": "12"}},
        {"text": "twelve", "want": 1.0, "columns": {"answer": "12"}},
        {"text": "112", "want": 0.0, "columns": {"answer": "12"}, "kind": "incorrect"},
    ]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    rows = tmp_path / "rows.jsonl"
    name = f"{tmp_path / 'lenient.py'}:reward"
    assert audit.main([name, "--cases", str(tmp_path / "cases.jsonl"), "--json", str(rows)]) == 1
    last = json.loads(rows.read_text().splitlines()[-1])
    assert (last["verifier"], last["cases"], last["false_accepts"], last["false_rejects"]) == (name, 3, 1, 1)
    assert "incorrect: 1 for 0: '112'" in capsys.readouterr().out


def test_a_line_that_is_no_case_is_named(audit, tmp_path, capsys):
    (tmp_path / "cases.jsonl").write_text('{"text": "a", "want": 1.0}\n{"text": "a", "wanted": 1.0}\n')
    assert audit.main(["format", "--cases", str(tmp_path / "cases.jsonl")]) == 2
    assert "cases.jsonl, line 2: " in capsys.readouterr().err
