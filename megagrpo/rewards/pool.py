"""Scores completions in worker processes, which can be killed.

A step's rewards must not depend on a scorer that hangs or dies: SymPy on a power tower, a regular expression
that backtracks, a user's function that loops. Threads can't be stopped, so every score is computed in a
process of its own.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import cast

from megagrpo.config.rollout_sections import RewardConfig, RewardsConfig
from megagrpo.rewards.build import takes_groups
from megagrpo.rewards.dispatch import Dispatcher
from megagrpo.rewards.messages import Failed, Reply, Request, RewardSpec, Score, Scores, Setup
from megagrpo.rewards.outage import OutageWatch
from megagrpo.rewards.worker_process import WorkerLimits
from megagrpo.types import Completion, Prompt, Reward

_Task = tuple[int, tuple[int, ...]]  # (position of the reward, positions of the completions)

NO_OPINION = "no reward has an opinion"
"""The detail of a completion's reward where every part leaves it out."""


class RewardPool:
    """Worker processes that compute every configured reward.

    A registered reward is called for one completion at a time. A user's function is called with all
    completions of one prompt; where that call crashes or takes longer than `timeout_seconds`, it is called
    again with each of them alone, so that only those at fault fail.

    Example:
        >>> with RewardPool(RewardsConfig(functions=[{"name": "math"}], workers=2)) as pool:  # doctest: +SKIP
        ...     rewards = pool.score([prompt, prompt], completions)
    """

    def __init__(self, config: RewardsConfig, sets: Mapping[str, Sequence[Prompt]] | None = None):
        """Start the workers and wait until each has loaded and warmed up its rewards.

        Args:
            config: the rewards, their weights and limits.
            sets: the prompts that are to be scored, by the field that names the set: a reward must find its
                columns in the first one of its sources. None: not checked.

        Raises:
            UserError: a reward is unknown, can't be loaded, refuses its options or needs another column, or a
                worker ends while it starts.
        """
        self._functions, self._failure_value = config.functions, config.failure_value
        names = tuple(function.name for function in config.functions)
        self.part_names = _name_parts(names)
        specs = tuple(
            RewardSpec(function.name, dict(function.options), _columns_of(function, sets or {}))
            for function in config.functions
        )
        self._dispatcher = Dispatcher(
            Setup(specs, tuple(sys.path)),
            config.workers,
            config.timeout_seconds,
            WorkerLimits(int(config.memory_gib * 2**30), config.network, config.environment),
            OutageWatch(names, config.outage_seconds, config.workers),
        )
        # One group at a time each. A group that isn't done has a request at a worker as soon as one is free,
        # so with as many threads as workers no worker is idle while a group waits.
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="score")

    @property
    def replaced_workers(self) -> int:
        """Workers that were killed after a time-out or found dead, since the start."""
        return self._dispatcher.replaced_workers

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """Return the reward of each completion, in the order given. May be called from several threads.

        Args:
            prompts: the prompt of each completion: as many entries as there are completions; a group repeats
                its prompt.
            completions: the completions, those of one prompt side by side.

        Raises:
            UserError: what ends the run: a missing column, a user's function that raised or returned what
                the contract does not allow, or a broken scorer. The workers are stopped.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts for {len(completions)} completions: one prompt per "
                "completion is needed"
            )
        results = self._run(self._split(prompts), prompts, completions)
        shared_failures = [
            task for task, result in results.items() if isinstance(result, Failed) and len(task[1]) > 1
        ]
        alone: list[_Task] = [
            (reward, (position,)) for reward, positions in shared_failures for position in positions
        ]
        results.update(self._run(alone, prompts, completions))
        for task in shared_failures:
            del results[task]
        parts: dict[tuple[int, int], Score | Failed] = {}
        for (reward, positions), result in results.items():
            values: Sequence[Score | Failed] = (
                result.scores if isinstance(result, Scores) else [cast(Failed, result)]
            )
            parts.update(
                {(reward, position): value for position, value in zip(positions, values, strict=True)}
            )
        unasked = Score(None)  # a reward has no opinion on the sources that it does not score
        return [
            self._combine([parts.get((reward, i), unasked) for reward in range(len(self._functions))])
            for i in range(len(completions))
        ]

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> "Future[list[Reward]]":
        """Score in the background, e.g. a finished group while others are generated; the result is that of
        `score`.
        """
        return self._threads.submit(self.score, prompts, completions)

    def close(self) -> None:
        """Stop and reap the workers; may be called twice. Scores that are waited for end with an error."""
        self._dispatcher.close()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _split(self, prompts: Sequence[Prompt]) -> list[_Task]:
        """Return the calls to make: one per completion of a registered reward, one per prompt of a user's
        function.
        """
        groups = [
            tuple(positions)
            for _, positions in groupby(range(len(prompts)), key=lambda position: prompts[position].id)
        ]
        singles = [(position,) for position in range(len(prompts))]
        return [
            (reward, task)
            for reward, f in enumerate(self._functions)
            for task in (groups if takes_groups(f.name) else singles)
            if _scores(f, prompts[task[0]])
        ]

    def _run(
        self, tasks: list[_Task], prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> dict[_Task, Reply]:
        requests = [
            Request(reward, [prompts[i] for i in positions], [completions[i] for i in positions])
            for reward, positions in tasks
        ]
        return dict(zip(tasks, self._dispatcher.run(requests), strict=True))

    def _combine(self, scores: list[Score | Failed]) -> Reward:
        """Return the weighted sum of a completion's parts, or the failure value and the first failure."""
        named = dict(zip(self.part_names, scores, strict=True))
        parts = {
            name: self._failure_value if isinstance(score, Failed) else score.value
            for name, score in named.items()
        }
        subparts = {
            f"{name}/{part}": value
            for name, score in named.items()
            if isinstance(score, Score)
            for part, value in score.parts.items()
        }
        first = next(
            (score for score in scores if isinstance(score, Failed) or score.value is not None), None
        )
        answer = first.answer if isinstance(first, Score) else None
        for name, score in named.items():
            if isinstance(score, Failed):
                return Reward(
                    self._failure_value, parts, score.outcome, f"{name}: {score.detail}", subparts, answer
                )
        weights = [function.weight for function in self._functions]
        opinions = [
            weight * part for weight, part in zip(weights, parts.values(), strict=True) if part is not None
        ]
        if not opinions:
            return Reward(self._failure_value, parts, "error", NO_OPINION, subparts, answer)
        return Reward(sum(opinions), parts, subparts=subparts, answer=answer)


def _scores(function: RewardConfig, prompt: Prompt) -> bool:
    """Say whether a reward scores the completions of a prompt."""
    return not function.sources or prompt.source in function.sources


def _columns_of(function: RewardConfig, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, list[str]]:
    """Return the columns of the first prompt of each set that a reward scores."""
    firsts = {
        place: next((prompt for prompt in prompts if _scores(function, prompt)), None)
        for place, prompts in sets.items()
    }
    return {place: list(prompt.columns) for place, prompt in firsts.items() if prompt is not None}


def _name_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Return a short, unique name per reward: the registered name or the function's, numbered where it
    comes again (`format_2`).
    """
    seen: Counter[str] = Counter()
    short = []
    for name in (name.rpartition(":")[2] for name in names):
        seen[name] += 1
        short.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(short)
