"""Seeds and requests of engines that draw by themselves."""

import itertools

import pytest

from megagrpo.engines.completion_rules import consecutive_runs, prompt_seed
from megagrpo.engines.server.command import command_line_arguments, device_environment
from megagrpo.errors import UserError
from megagrpo.types import Prompt, SamplingParams


def test_completions_are_asked_for_in_runs_that_keep_their_order():
    assert consecutive_runs([2, 3, 4, 0, 1, 6], 8) == [range(2, 5), range(0, 2), range(6, 7)]
    assert consecutive_runs(range(5), 2) == [range(0, 2), range(2, 4), range(4, 5)]
    assert consecutive_runs([], 2) == []


def test_seeds_of_completions_differ_by_prompt_step_and_run_seed_and_fit_64_bits_with_their_index():
    seeds = {
        prompt_seed(SamplingParams(1, seed=seed, step=step), Prompt(prompt, "", (1,)))
        for seed in range(4) for step in range(20) for prompt in range(50)
    }  # fmt: skip
    assert len(seeds) == 4 * 20 * 50
    ordered = sorted(seeds)
    # far more than completions of a prompt
    assert min(high - low for low, high in itertools.pairwise(ordered)) > 2**20
    assert ordered[0] >= 0 and ordered[-1] < 2**62


def test_every_replica_of_a_machine_has_devices_of_its_own():
    assert device_environment(2, 2, None) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert device_environment(1, 2, "4,5,6") == {"CUDA_VISIBLE_DEVICES": "5,6"}
    with pytest.raises(
        UserError,
        match=r"engine.server.tensor_parallel: 2: devices from number 2 on are wanted, "
        r"CUDA_VISIBLE_DEVICES is 4,5,6",
    ):
        device_environment(2, 2, "4,5,6")


def test_options_become_arguments():
    options = {
        "block_size": 32,
        "enforce_eager": True,
        "absent": None,
        "off": False,
        "extra": {"a": 1},
        "ids": [1, 2],
    }
    assert command_line_arguments(options) == [
        "--block-size",
        "32",
        "--enforce-eager",
        "--extra",
        '{"a": 1}',
        "--ids",
        "[1, 2]",
    ]
