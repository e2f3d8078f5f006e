"""The example that adds a loss runs as its docstring says, alone and by its place in a configuration."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def run_python(*arguments):
    result = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_raises_the_probability_of_the_rewarded_token():
    before, after = re.search(
        r"rewarded token: (\S+) -> (\S+)", run_python("examples/custom_algorithm.py")
    ).groups()
    assert float(after) > float(before) + 0.05


def test_configuration_names_the_example_by_its_place():
    code = """
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.config.algorithm_section import AlgorithmConfig
config = AlgorithmConfig(loss="examples/custom_algorithm.py:power_clip", loss_options={"power": 0.5})
print(Algorithm(config, 4, 8).needs_old_logprobs)
"""
    assert run_python("-c", code) == "True\n"
