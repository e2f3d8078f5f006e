"""Generates and scores: groups are dealt over all ranks' engines, only metadata comes back to everyone.

One rank's share (`_sample_and_score`) needs no other rank, so it may run in a thread while the main thread
trains; `_gather` alone talks to the others.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

from megagrpo.engines.base import Engine, EngineError
from megagrpo.errors import RelayedError, SharedUserError, StopRequested
from megagrpo.parallel.background import BackgroundWork
from megagrpo.parallel.groups import ParallelGroups, all_gather_metadata
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.dealing import LengthEstimates
from megagrpo.rollout.replica_states import EngineFailure, ReplicaStates
from megagrpo.rollout.rollouts import CompletionRecord, SampleKey, StepRollouts
from megagrpo.rollout.shares import (
    ScoredCompletions,
    ShareFailure,
    ShareMetadata,
    describe_failure,
    describe_share,
)
from megagrpo.types import Completion, Prompt, Reward, SamplingParams

STOP_POLL_SECONDS = 0.5  # between two looks, while scores are waited for, at whether they are still wanted


class RolloutFailedError(RelayedError):
    """Generating or scoring failed on some rank. Raised on all ranks alike, between two updates: the
    trainer's state is whole.
    """


@dataclass(frozen=True)
class RolloutRequest:
    """What is to be generated, the same on all ranks."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    completions_per_prompt: int
    first_index: int = 0  # first completion index of a prompt that has been sampled in this step already
    # of these prompts' data set; what comes is added
    lengths: LengthEstimates = field(default_factory=LengthEstimates)


class PendingRollouts:
    """A request whose share runs in a thread of this rank, or is there already."""

    def __init__(
        self,
        request: RolloutRequest,
        share: BackgroundWork[ScoredCompletions] | ScoredCompletions | BaseException,
    ):
        self.request, self._share = request, share

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until this rank's share is there or has failed; say whether it is."""
        return not isinstance(self._share, BackgroundWork) or self._share.wait(seconds)

    def outcome(self) -> ScoredCompletions | BaseException:
        """Wait, and return this rank's share or what it failed with."""
        return self._share.outcome() if isinstance(self._share, BackgroundWork) else self._share


class RolloutGenerator:
    """The engines and reward workers of all ranks as one: every rank calls, each does its share."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        groups: ParallelGroups,
        replica_of_rank: Sequence[int],
        is_embedded: bool = True,
        revive: Callable[[], bool] = lambda: False,
    ):
        """
        Args:
            revive: starts lost replicas anew when none is left, says if any is then. Collective.
            replica_of_rank: the engine replica that each rank generates through.
            is_embedded: the engine is part of the rank: where it fails, another rank's would too. Otherwise
                other replicas take over.
        """
        self.engine, self.rewards, self.groups, self.is_embedded = engine, rewards, groups, is_embedded
        self.replicas = ReplicaStates(replica_of_rank)
        self.revive = revive
        self._is_closing = False  # shares that run in threads end early
        self.is_given_up = False  # those that the main thread waits for do
        self._is_waited_for = False

    def generate(self, request: RolloutRequest) -> StepRollouts:
        """Return the scored completions of the prompts, one group each. Collective over all ranks, which pass
        the same request.

        A prompt that comes twice gets the next completion indices too, so that its groups differ.

        Raises:
            SharedUserError, RolloutFailedError: it failed on some rank; raised on all of them.
            StopRequested: `give_up` was called on some rank; raised on all of them.
        """
        return self._gather(request, self._attempt(request, range(len(request.prompts))))

    def start(self, request: RolloutRequest) -> PendingRollouts:
        """Begin this rank's share of `request` in a thread. Every rank must, and then `finish` it; the
        engine is taken until it ended.
        """
        mine = self._deal(request, range(len(request.prompts)))
        share = BackgroundWork(
            lambda: self._sample_and_score(request, mine, lambda: self._is_closing), "generate"
        )
        return PendingRollouts(request, share)

    def finish(self, pending: PendingRollouts) -> StepRollouts:
        """Wait for `pending` and return what `generate` would have. Collective over all ranks. Raises as
        `generate` does.
        """
        return self._gather(pending.request, pending.outcome())

    def settle(self, pending: PendingRollouts) -> PendingRollouts:
        """Wait for `pending`, and have what an engine failed on generated by others, under the weights that
        they still serve.

        Collective over all ranks. What failed otherwise, and what nobody is left for, is returned as it is,
        for `finish`.
        """
        share = pending.outcome()
        while True:
            own = None if isinstance(share, BaseException) else describe_share(share, self.groups.rank)
            gathered = all_gather_metadata((self.is_given_up, own))
            everyone = [told for _, told in gathered if told is not None]
            if (
                isinstance(share, BaseException)
                or len(everyone) < len(gathered)
                or any(is_given_up for is_given_up, _ in gathered)
            ):
                return PendingRollouts(pending.request, share)
            pause = self.replicas.take(
                [told.failure for told in everyone], [told.rank for told in everyone if told.records]
            )
            share = replace(share, failure=None)  # it is known now
            missing = sorted(
                set(range(len(pending.request.prompts))).difference(*(told.groups for told in everyone))
            )
            if not missing or not self.replicas.is_any_left:
                return PendingRollouts(pending.request, share)
            time.sleep(pause)
            more = self._attempt(pending.request, missing, is_retry=True)
            share = more if isinstance(more, BaseException) else share.joined(more)

    def stop(self, pending: PendingRollouts) -> None:
        """Give `pending` up: end it early and wait for its thread. This rank generates nothing any more."""
        self._is_closing = True
        while not pending.wait(seconds=0.1):
            self.engine.abort()  # again and again: one that comes before the engine's own start is lost

    def give_up(self) -> None:
        """End early what all ranks wait for, now and from now on; called again and again, from another thread
        than the one that waits.

        Rollouts in threads go on to their end: what trains on them is not decided by who stops now.
        """
        self.is_given_up = True
        if self._is_waited_for:
            self.engine.abort()

    # ---- this rank's share

    def _attempt(
        self, request: RolloutRequest, groups: Sequence[int], is_retry: bool = False
    ) -> ScoredCompletions | BaseException:
        """Return this rank's share of `groups`, or what it failed with, which the others are to be told."""
        self._is_waited_for = True
        try:
            return self._sample_and_score(
                request, self._deal(request, groups, is_retry), lambda: self.is_given_up
            )
        except Exception as error:  # handed to all ranks, which raise it alike
            return error
        finally:
            self._is_waited_for = False

    def _deal(self, request: RolloutRequest, groups: Sequence[int], is_retry: bool = False) -> list[int]:
        prompts = [request.prompts[group] for group in groups]
        costs = [
            len(prompt.token_ids) + request.completions_per_prompt * request.lengths.expected_tokens(prompt)
            for prompt in prompts
        ]
        return [groups[number] for number in self.replicas.deal(costs, is_retry)[self.groups.rank]]

    def _sample_and_score(
        self, request: RolloutRequest, mine: Sequence[int], is_given_up: Callable[[], bool]
    ) -> ScoredCompletions:
        """Sample the groups `mine`, and score each as soon as it is there. No collective. An engine that
        fails ends the share early.

        The k-th occurrence of a prompt takes the k-th run of completion indices. Once `is_given_up` what is
        returned means nothing.
        """
        started = time.perf_counter()
        scores: dict[int, Future[list[Reward]]] = {}
        completions: dict[SampleKey, Completion] = {}
        count, failure, life = request.completions_per_prompt, None, self.replicas.life(self.groups.rank)
        for occurrence, groups in self._by_occurrence(request.prompts, mine).items():
            if is_given_up():
                break
            prompts = [request.prompts[group] for group in groups]

            def on_group(
                position: int,
                group: list[Completion],
                groups: list[int] = groups,
                prompts: list[Prompt] = prompts,
            ) -> None:
                if is_given_up():
                    return
                completions.update(
                    {(groups[position], place): completion for place, completion in enumerate(group)}
                )
                scores[groups[position]] = self.rewards.submit([prompts[position]] * len(group), group)

            start = request.first_index + occurrence * count
            try:
                self.engine.generate(prompts, request.sampling, range(start, start + count), on_group)
            except EngineError as error:
                if self.is_embedded:
                    raise
                failure = EngineFailure(str(error), self.engine.health().ready, life)
                break
        generated = time.perf_counter()
        while not is_given_up() and wait(scores.values(), timeout=STOP_POLL_SECONDS).not_done:
            pass
        if is_given_up():
            return ScoredCompletions({}, {})
        rewards = {
            (group, place): reward
            for group, future in scores.items()
            for place, reward in enumerate(future.result())
        }
        return ScoredCompletions(
            completions, rewards, generated - started, time.perf_counter() - generated, failure
        )

    @staticmethod
    def _by_occurrence(prompts: Sequence[Prompt], mine: Sequence[int]) -> dict[int, list[int]]:
        """Return the groups `mine` by how often their prompt has come before in `prompts`."""
        seen: Counter[int] = Counter()
        own = set(mine)
        groups_of_occurrence: dict[int, list[int]] = defaultdict(list)
        for group, prompt in enumerate(prompts):
            if group in own:
                groups_of_occurrence[seen[prompt.id]].append(group)
            seen[prompt.id] += 1
        return groups_of_occurrence

    # ---- all ranks

    def _gather(self, request: RolloutRequest, outcome: ScoredCompletions | BaseException) -> StepRollouts:
        """Tell every rank what the others have, and have groups that an engine failed on generated again.
        Collective over all ranks.
        """
        records: dict[SampleKey, CompletionRecord] = {}
        local: dict[SampleKey, Completion] = {}
        seconds = waited = 0.0
        while True:
            everyone = self._tell_everyone(outcome)
            records |= {record.key: record for told in everyone for record in told.records}
            local |= outcome.completions
            seconds += max(told.generation_seconds for told in everyone)
            waited += max(told.scoring_wait_seconds for told in everyone)
            pause = self.replicas.take(
                [told.failure for told in everyone], [told.rank for told in everyone if told.records]
            )
            missing = sorted(set(range(len(request.prompts))) - {group for group, _ in records})
            if not missing:
                break
            if not self.replicas.is_any_left and not self.revive():
                raise RolloutFailedError(f"no rollout engine is left: {self.replicas.describe_lost()}")
            time.sleep(pause)
            outcome = self._attempt(request, missing, is_retry=True)
        rollouts = StepRollouts(
            list(request.prompts),
            dict(sorted(records.items())),
            local,
            request.completions_per_prompt,
            seconds,
            waited,
        )
        request.lengths.observe(rollouts)
        return rollouts

    def _tell_everyone(self, outcome: ScoredCompletions | BaseException) -> list[ShareMetadata]:
        failed = isinstance(outcome, BaseException)
        own = describe_failure(outcome) if failed else describe_share(outcome, self.groups.rank)
        gathered = all_gather_metadata((self.is_given_up, own))
        # before all failures: an engine may have been sent the same signal
        if any(is_given_up for is_given_up, _ in gathered):
            raise StopRequested
        everyone = [told for _, told in gathered]
        failures = {rank: told for rank, told in enumerate(everyone) if isinstance(told, ShareFailure)}
        if failures:
            rank, first = next(iter(failures.items()))
            error = (
                SharedUserError(first.message)
                if first.by_user
                else RolloutFailedError(f"rank {rank}: {first.message}")
            )
            raise error from (outcome if failed else None)
        return everyone
