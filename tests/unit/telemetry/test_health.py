"""A run warns by itself of what a colleague would see in its curves: once, with what to do."""

import shutil
from collections import namedtuple

import pytest

from megagrpo.config.mistakes import field_places
from megagrpo.config.schema import Config, TelemetryConfig
from megagrpo.telemetry import names
from megagrpo.telemetry.health import RULES, Health, look_at_disk
from megagrpo.telemetry.recorder import Recorder
from megagrpo.telemetry.warnings_file import read_warnings

HEALTHY = {
    names.STEP_SECONDS: 10.0,
    names.REWARD: 0.3,
    names.REWARD_STD: 0.45,
    names.GROUPS: 32,
    names.SIGNAL_GROUPS: 20,
    names.SOLVED_GROUPS: 4,
    names.REPEATED_PROMPTS: 0,
    names.LENGTH: 300.0,
    names.CUT_FRACTION: 0.02,
    names.ENTROPY: 0.5,
    names.REFERENCE_KL: 0.01,
    names.MEAN_LOGPROB_GAP: 1e-4,
    names.LEARNING_RATE: 1e-6,
    names.GENERATION_SECONDS: 6.0,
    names.SCORING_WAIT_SECONDS: 0.1,
    names.FAILED_FRACTION: 0.0,
    names.PADDING_FRACTION: 0.05,
}


def warned(later, steps=20):
    """Names of the warnings of a run whose second half has `later` in its rows."""
    health, found = Health(), []
    for step in range(steps):
        found += health.look(HEALTHY | (later if step >= steps // 2 else {}))
    return [warning.name for warning in found]


def test_a_healthy_run_warns_of_nothing():
    assert warned({}) == []


FAULTS = {
    "no_signal": {names.SIGNAL_GROUPS: 0},
    "truncation": {names.CUT_FRACTION: 0.5},
    "entropy_collapse": {names.ENTROPY: 0.05},
    "length_growth": {names.LENGTH: 900.0},
    "kl_growth": {names.REFERENCE_KL: 3.0},
    "mismatch_growth": {names.MEAN_LOGPROB_GAP: 0.05},
    "no_learning_rate": {names.LEARNING_RATE: 0.0},
    "slow_rewards": {names.SCORING_WAIT_SECONDS: 20.0},
    "failing_rewards": {names.FAILED_FRACTION: 0.4},
    "repeated_prompts": {names.REPEATED_PROMPTS: 2},
    "padding": {names.PADDING_FRACTION: 0.6},
}


@pytest.mark.parametrize(("name", "later"), FAULTS.items())
def test_each_fault_is_warned_of_once(name, later):
    assert warned(later) == [name]


def test_every_rule_is_tried():
    assert [rule.name for rule in RULES] == list(FAULTS)


@pytest.mark.parametrize(
    "later",
    [
        {names.ENTROPY: 0.05, names.REWARD: 0.8},  # it learns
        {names.ENTROPY: 0.05, names.SIGNAL_GROUPS: 1, names.SOLVED_GROUPS: 30},  # it is done
        {names.LENGTH: 900.0, names.REWARD: 0.6},
    ],
)
def test_a_run_that_learns_may_lose_entropy_and_write_more(later):
    assert warned(later) == []


def test_a_schedule_that_ends_at_zero_is_not_warned_of():
    health = Health()
    found = [health.look(HEALTHY | {names.LEARNING_RATE: 1e-6 * (9 - step)}) for step in range(10)]
    assert not any(found)


def test_every_advice_names_fields_that_exist():
    places = set(field_places(Config))
    for rule in RULES:
        words = [word.split("=")[0].strip("(),;:") for word in rule.advice.split()]
        named = [word for word in words if word.split(".")[0] in Config.model_fields and "." in word]
        assert set(named) <= places, rule.name
    assert any("rollout.temperature" in rule.advice for rule in RULES)


def test_a_warning_is_on_the_screen_in_the_log_and_on_file_and_not_again_after_a_resume(tmp_path, capsys):
    for last_step in (None, 12):
        recorder = Recorder(tmp_path, 40, TelemetryConfig(writers=("jsonl",)), "")
        recorder.open(last_step)
        for step in range(1, 13):
            recorder.step(step + (last_step or 0), HEALTHY | {names.CUT_FRACTION: 0.5})
        recorder.finish(1.0, [1])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: 50% of the completions were cut at rollout.max_new_tokens: raise")
    assert (tmp_path / "log.txt").read_text().count(line) == 1
    (kept,) = read_warnings(tmp_path)
    assert (kept["step"], kept["name"]) == (3, "truncation") and f"warning: {kept['text']}" == line


def test_notes_and_warnings_hold_no_secret_and_steer_no_terminal(tmp_path, capsys, monkeypatch):
    """What a judge or a server answered may be in them, and with it the key that it was sent."""
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    recorder = Recorder(tmp_path, 40, TelemetryConfig(writers=("jsonl",)), "")
    recorder.note("before it is open: sk-12345678")
    recorder.open(None)
    recorder.note("warning: 401 for key sk-12345678 \x1b[2J")
    recorder.warn_once("judge", "sk-12345678 again")
    recorder.close()
    files = [path.read_text() for path in (tmp_path / "log.txt", tmp_path / "warnings.jsonl")]
    for text in (capsys.readouterr().out, *files):
        assert "12345678" not in text and "\x1b" not in text
        assert "401 for key ***" in text and "*** again" in text


def test_a_disk_that_is_nearly_full_is_warned_of(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 2**30))
    (warning,) = look_at_disk(tmp_path)
    assert "1.0 GiB left" in warning.text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 50, 50 * 2**30))
    assert look_at_disk(tmp_path) == []
