"""`megagrpo config` and the metric dictionary say what the code says."""

import re

import pytest

from megagrpo import cli
from megagrpo.algorithms.metrics import METRIC_SPECS
from megagrpo.config.mistakes import field_paths
from megagrpo.config.presets import PRESETS
from megagrpo.config.schema import Config
from megagrpo.errors import UserError
from megagrpo.planning.config_help import LISTS, describe, merged_fields
from megagrpo.planning.metric_dictionary import declarations, find


def test_every_field_of_the_configuration_is_listed():
    listed = {field.place for field in merged_fields()}
    assert set(field_paths(Config)) <= listed
    assert {"rewards.functions.N.weight", "evaluation.sets.N.temperature"} <= listed
    assert all(f"{place} = " in describe(None) for place in field_paths(Config))


@pytest.mark.parametrize(
    ("place", "takes", "default"),
    [
        ("rollout.temperature", "number > 0", "1"),
        ("run.resume", "auto | never", "auto"),
        ("rollout.logprob_gap.warn_above", "number > 0 | auto | null", "auto"),
        ("model.path", "text", "required"),
        ("parallel.vpp", "whole number >= 2 | null", "null"),
        ("run.allow_config_changes", "list of text", "[]"),
    ],
)
def test_a_field_says_what_it_takes_and_its_default(place, takes, default):
    lines = describe(place).splitlines()
    assert lines[0] == place and lines[1].startswith(f"  takes    {takes}")
    assert lines[2] == f"  default  {default}"


def test_a_field_that_some_kinds_of_a_section_have_names_them():
    assert re.search(r"kinds    vllm, sglang", describe("engine.server.tensor_parallel"))


def test_lists_hold_the_registered_names():
    for name in LISTS:
        assert describe(name).count("\n") > 1, name
    assert all(f"  {preset}: " in describe("presets") for preset in PRESETS)
    assert "  math: " in describe("rewards") and "  vllm: servers" in describe("engines")
    assert "qwen3_moe" in describe("families") and "ppo_clip: Compute -min(r A" in describe("losses")


def test_a_word_finds_fields_and_another_trainers_name_is_translated():
    assert "rollout.temperature" in describe("sampling temperature")
    assert describe("num_generations") == "num_generations: here it is rollout.completions_per_prompt"
    with pytest.raises(UserError, match="rolout: no field, section or list has this word; did you mean"):
        describe("rolout")


def test_a_section_lists_its_fields():
    assert "optimizer.lr = 1e-06" in describe("optimizer") and "rollout." not in describe("optimizer")


def test_every_declared_loss_metric_is_in_the_dictionary():
    for name in METRIC_SPECS:
        found = find("loss/total" if name == "loss" else f"policy/{name}")
        assert found is not None and found.meaning, name


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("eval/held_out", "eval/*"),
        ("eval/held_out/pass@4", "eval/*/*"),
        ("eval/held_out/failed_fraction/timeout", "eval/*/failed_fraction*"),
        ("reward/math", "reward/*"),
        ("reward/failed_fraction/crash", "reward/failed_fraction/*"),
        ("policy/rollout_gap/position_64", "policy/rollout_gap*"),
        ("policy/rollout_gap_max", "policy/rollout_gap_max*"),
        ("time/rollout_cpu_seconds", "time/*_cpu_seconds"),
        ("publish/write_seconds", "publish/*_seconds"),
    ],
)
def test_the_nearest_declaration_is_the_one_that_counts(name, pattern):
    assert find(name).pattern == pattern


def test_a_number_that_nobody_declared_is_in_no_dictionary():
    assert find("rollout/nonsense") is None
    patterns = [entry.pattern for entry in declarations()]
    assert len(set(patterns)) == len(patterns)


def test_the_command_prints_the_version_and_short_help(monkeypatch, capsys):
    for argument, text in (("--version", "megagrpo 0."), ("-h", "Usage:")):
        monkeypatch.setattr("sys.argv", ["megagrpo", argument])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 0 and text in capsys.readouterr().out


def test_a_command_near_another_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["megagrpo", "reprot"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2 and "report" in capsys.readouterr().err
