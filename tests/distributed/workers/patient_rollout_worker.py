"""Worker: one rank's rollout takes longer than a collective may; then one rank dies while another waits."""

import os
import time
from concurrent.futures import Future

import numpy as np
from reported_cases import reported_case

from megagrpo.device import device
from megagrpo.parallel.groups import build_groups, wait_for_all_ranks
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest
from megagrpo.types import Completion, Prompt, Reward, SamplingParams

TIMEOUT_SECONDS = 3


class SlowEngine:
    """One token a completion, after `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def generate(self, prompts, sampling, completion_indices, on_group):
        time.sleep(self.seconds)
        for position, prompt in enumerate(prompts):
            group = [
                Completion.sampled(
                    prompt.id, index, np.array([1]), np.zeros(1, np.float32), "stop", ((0, 1),), ""
                )
                for index in completion_indices
            ]
            on_group(position, group)


class Rewards:
    """One for every completion."""

    def submit(self, prompts, completions):
        future = Future()
        future.set_result([Reward(1.0, {}) for _ in completions])
        return future


def main() -> None:
    device.setup()
    groups = build_groups(ParallelLayout(2), TIMEOUT_SECONDS)
    with reported_case("a long share"):
        engine = SlowEngine(2.5 * TIMEOUT_SECONDS if groups.rank else 0.0)
        generator = RolloutGenerator(engine, Rewards(), groups, range(2))
        prompts = [Prompt(number, "", (1, 2)) for number in range(4)]
        rollouts = generator.generate(RolloutRequest(prompts, SamplingParams(1), 2))
        assert len(rollouts.records) == 8
    with reported_case("a rank that dies"):
        if groups.rank:
            os._exit(0)
        started = time.monotonic()
        try:
            wait_for_all_ranks()
        except RuntimeError:
            assert time.monotonic() - started < 30
        else:
            raise AssertionError("a dead rank was waited for")
    os._exit(0)  # its group is broken


if __name__ == "__main__":
    main()
