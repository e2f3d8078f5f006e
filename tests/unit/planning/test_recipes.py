"""The examples load, and what needs no model folder is consistent. Those in configs/ are for GPUs:
tests/rehearsal/test_recipes_fit.py checks them with their models.
"""

from pathlib import Path

import pytest

from megagrpo.config.load import load_config
from megagrpo.planning.checks import check_config

# those of examples/launch are for schedulers
EXAMPLES = [path for path in sorted(Path("examples").glob("*/*.yaml")) if path.parent.name != "launch"]


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_an_example_loads_and_its_sections_agree(path):
    config = load_config(path, [])
    world_size = config.parallel.tp * config.parallel.pp * 2
    missing = ("no such folder", "no such file", "no config.json")  # models and data that a user brings
    problems = [
        line for line in check_config(config, world_size, None) if not any(text in line for text in missing)
    ]
    assert problems == []


def test_dapo_recipe_is_what_the_paper_says():
    algorithm = load_config("configs/llama3_8b_dapo.yaml", []).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert algorithm.aggregation == "group_token_mean" and algorithm.kl.coef == 0
    assert algorithm.dynamic_sampling.enabled and algorithm.overlong.penalty == 1.0
