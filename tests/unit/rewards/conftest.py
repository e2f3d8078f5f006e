"""What the reward tests score."""

import numpy as np
import pytest

from megagrpo.config.rollout_sections import RewardConfig, RewardsConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Completion, Prompt


@pytest.fixture(scope="session")
def make_group():
    """Return a builder of (prompts, completions): one prompt with `texts` as its completions, aligned as
    RewardPool.score wants them.
    """

    def make(*texts: str, prompt_id: int = 0, **columns) -> tuple[list[Prompt], list[Completion]]:
        prompt = Prompt(prompt_id, "question", (1, 2), columns)
        return [prompt] * len(texts), [
            Completion.sampled(
                prompt_id, index, np.array([1]), np.array([0.0], np.float32), "stop", ((0, 0),), text
            )
            for index, text in enumerate(texts)
        ]

    return make


@pytest.fixture
def open_pool():
    """Return a builder of pools that are closed after the test."""
    pools = []

    def open_one(
        *functions: str | RewardConfig, workers=1, timeout_seconds=20.0, failure_value=-5.0, **options
    ) -> RewardPool:
        configs = tuple(
            function if isinstance(function, RewardConfig) else RewardConfig(name=function)
            for function in functions
        )
        pools.append(
            RewardPool(
                RewardsConfig(
                    functions=configs,
                    workers=workers,
                    timeout_seconds=timeout_seconds,
                    failure_value=failure_value,
                    **options,
                )
            )
        )
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.close()


@pytest.fixture
def write_reward(tmp_path):
    """Return a writer of a user's reward file; it returns the name to put in the configuration."""

    def write(body: str) -> str:
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        (tmp_path / "user_reward.py").write_text(
            f"import os, signal, subprocess, sys, time\n\n\ndef reward(prompts, completions):\n{lines}\n"
        )
        return f"{tmp_path / 'user_reward.py'}:reward"

    return write
