"""Measures the control code of one step on rank 0 of a large world: what every rank computes from metadata
while its GPU waits.

    python tools/bench_scale.py                                  # 512 and 2,048 ranks, 2,048 prompts x 16
    python tools/bench_scale.py --ranks 64 --prompts 64 --json a.json

The process group carries nothing: a gather returns the own part in each rank's place, so packing and
unpacking are those of the real size; waiting for others is not measured. Lengths are drawn log-normal around
1,000 tokens. What is timed, in CPU seconds:

    deal       which rank generates which group
    gather     what all ranks are told of the completions
    plan       micro-batches of every update, and which rank sends which tokens to whom

The plan of a publish to as many ranks is measured by `bench_publish.py --simulate`.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.microbatches import PackingRules
from megagrpo.policy.mini_batches import MiniBatchBuilder
from megagrpo.rollout.dealing import deal_groups
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Prompt, Reward

MEAN_TOKENS, SPREAD, LONGEST = 1000.0, 0.6, 8192
GPUS_A_REPLICA = 8


def rollouts_of(num_ranks: int, num_prompts: int, completions: int) -> StepRollouts:
    """A step's rollouts as rank 0 knows them."""
    draw = np.random.default_rng(0)
    prompts = [
        Prompt(id=number, text="", token_ids=(1,) * int(length))
        for number, length in enumerate(draw.integers(50, 400, num_prompts))
    ]
    lengths = np.minimum(draw.lognormal(np.log(MEAN_TOKENS), SPREAD, (num_prompts, completions)), LONGEST)
    dealt = deal_groups(lengths.sum(1).tolist(), list(range(num_ranks)))
    rank_of = {group: rank for rank, groups in enumerate(dealt) for group in groups}
    records, local = {}, {}
    for group in range(num_prompts):
        for place in range(completions):
            length = max(1, int(lengths[group, place]))
            records[group, place] = CompletionRecord(
                (group, place), rank_of[group], length, "stop", Reward(float(draw.integers(2))), 1
            )
            if rank_of[group] == 0:
                local[group, place] = SimpleNamespace(
                    token_ids=np.zeros(length, np.int64), logprobs=np.zeros(length, np.float32)
                )
    return StepRollouts(prompts, records, local, completions)


class OwnPartForAll:
    """`dist.all_gather` of a world in which every rank says what this one says."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        self.calls += 1
        for part in parts:
            part.copy_(own)


def measure(num_ranks: int, num_prompts: int, completions: int, mini_batches: int) -> dict[str, float]:
    """CPU seconds of each part on rank 0, the collectives that it entered, and the peak of its memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    gather, real = OwnPartForAll(), dist.all_gather
    dist.all_gather = gather
    try:
        return _measure(num_ranks, num_prompts, completions, mini_batches, gather)
    finally:
        dist.all_gather = real
        dist.destroy_process_group()


def _measure(
    num_ranks: int, num_prompts: int, completions: int, mini_batches: int, gather: OwnPartForAll
) -> dict[str, float]:
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        seconds[name] = time.process_time() - started
        return result

    rollouts = rollouts_of(num_ranks, num_prompts, completions)
    costs = [float(len(prompt.token_ids)) for prompt in rollouts.prompts]
    replica_of_rank = [rank // GPUS_A_REPLICA for rank in range(num_ranks)]
    timed("deal", lambda: deal_groups(costs, replica_of_rank))
    own = [record for record in rollouts.records.values() if record.source_rank == 0]
    timed("gather", lambda: all_gather_metadata(own))
    layout = ParallelLayout(num_ranks, tp=4, pp=2)
    rules = PackingRules(16384, 8, share_prompts=False, min_microbatches=layout.min_microbatches)
    builder = MiniBatchBuilder(
        SimpleNamespace(dp_rank=0),
        layout,
        SimpleNamespace(build=lambda plan, sample_of, count: [sample_of(i) for t in plan for i in t.samples]),
        rules,
        4096,
    )
    trains = torch.ones(num_prompts, completions, dtype=torch.bool)
    timed("plan", lambda: builder.build(rollouts, trains, mini_batches))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "ranks": num_ranks,
        **{f"{name}_cpu_seconds": value for name, value in seconds.items()},
        "cpu_seconds": sum(seconds.values()),
        "gathers": gather.calls,
        "peak_bytes": peak,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 2048], help="multiples of 8")
    parser.add_argument("--prompts", type=int, default=2048, help="of a step")
    parser.add_argument("--completions", type=int, default=16, help="of a prompt")
    parser.add_argument("--mini-batches", type=int, default=4, help="updates of a step")
    parser.add_argument("--json", help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    """Print a row for each number of ranks."""
    arguments = parse_arguments()
    rows = [
        measure(ranks, arguments.prompts, arguments.completions, arguments.mini_batches)
        for ranks in arguments.ranks
    ]
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
