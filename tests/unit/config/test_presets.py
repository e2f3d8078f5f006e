"""Presets resolve to what their papers say, fill only gaps, and need no torch."""

import copy
import subprocess
import sys

import pytest

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.config.presets import PRESETS, apply_preset
from megagrpo.errors import UserError


def resolve(**raw):
    return AlgorithmConfig(**apply_preset(raw)["algorithm"])


def test_dapo_is_what_its_paper_says():
    """arXiv 2503.14476: clip-higher 0.2 / 0.28, token-level loss within the group, dynamic sampling, soft
    overlong punishment over the last 4096 of 20480 tokens, no KL."""
    config = resolve(algorithm={"preset": "dapo"}, rollout={"max_new_tokens": 20480})
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)
    assert config.aggregation == "group_token_mean"
    assert config.dynamic_sampling.enabled
    assert (config.overlong.penalty, config.overlong.buffer_of(20480), config.overlong.mask) == (
        1.0,
        4096,
        False,
    )
    assert config.kl.coef == 0.0 and config.entropy_coef == 0.0
    assert (config.advantages, config.loss) == ("grpo", "ppo_clip")
    assert not Algorithm(config, 16, 20480).needs_reference


def test_dr_grpo_divides_by_the_generation_budget():
    config = resolve(algorithm={"preset": "dr_grpo"}, rollout={"max_new_tokens": 3000})
    assert (config.advantages, config.aggregation, config.aggregation_constant) == (
        "dr_grpo",
        "constant",
        3000,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_an_algorithm(name):
    algorithm = Algorithm(resolve(algorithm={"preset": name}), completions_per_prompt=8, max_new_tokens=256)
    assert algorithm.config.preset == name


@pytest.mark.parametrize("name", PRESETS)
def test_values_of_the_user_win(name):
    mine = {
        "preset": name,
        "clip_high": 0.31,
        "aggregation": "token_mean",
        "kl": {"coef": 0.5},
        "overlong": {"buffer_tokens": 7},
    }
    config = resolve(algorithm=mine)
    assert (config.clip_high, config.aggregation, config.kl.coef, config.overlong.buffer_tokens) == (
        0.31,
        "token_mean",
        0.5,
        7,
    )
    assert config.advantages == PRESETS[name]["advantages"]


def test_input_is_left_untouched_and_other_sections_stay():
    raw = {
        "algorithm": {"preset": "dapo", "kl": {"linear_above": 5.0}},
        "rollout": {"max_new_tokens": 100},
        "run": {"seed": 3},
    }
    before = copy.deepcopy(raw)
    resolved = apply_preset(raw)
    assert raw == before
    assert resolved["run"] == {"seed": 3} and resolved["algorithm"]["kl"] == {
        "linear_above": 5.0,
        "coef": 0.0,
    }


def test_presets_do_not_leak_into_each_other():
    resolve(algorithm={"preset": "dapo", "kl": {"coef": 9.0}})
    assert resolve(algorithm={"preset": "dapo"}).kl.coef == 0.0


@pytest.mark.parametrize("raw", [{}, {"algorithm": {}}, {"algorithm": {"preset": None}}, {"algorithm": None}])
def test_without_a_preset_nothing_changes(raw):
    assert apply_preset(raw) == raw


def test_mistake_in_the_limit_is_left_to_validation():
    assert (
        apply_preset({"algorithm": {"preset": "dr_grpo"}, "rollout": {"max_new_tokens": "many"}})[
            "algorithm"
        ]["aggregation_constant"]
        > 0
    )


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"algorithm\.preset: 'dpao' is not a preset; did you mean dapo"):
        apply_preset({"algorithm": {"preset": "dpao"}})


def test_presets_import_no_torch():
    code = "import sys, megagrpo.config.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
