"""Which rank generates which group: by expected length, so that no rank waits for another that drew the long
ones, and by which engine replicas there are. The same on all ranks, from metadata that all hold.

What is generated doesn't depend on the rank, so this decides time alone. What a replica failed on goes to
others, where there are any, after a pause that doubles. One whose engine still says that it serves gets
prompts again; one that doesn't, or that fails MAX_FAILURES times in a row, is lost: it gets none until it is
recovered.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megagrpo.parallel.plain_data import exchangeable
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import Prompt

# How much a prompt's newest mean length counts in its running estimate: the policy changes, so a length that
# is an epoch old is a hint.
NEWEST_WEIGHT = 0.5
MAX_PROMPTS = 1 << 16  # those that were seen last; more would make checkpoints grow with the data set
MAX_FAILURES = 3
FIRST_PAUSE_SECONDS = 0.5


class LengthEstimates:
    """A running estimate of the completion length of each prompt; prompts never seen are judged by their
    own length.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}  # by prompt id, the last seen last
        self._tokens_per_prompt_token = 1.0  # the ratio in the newest rollouts

    def expected_tokens(self, prompt: Prompt) -> float:
        """Return the expected length of one completion of `prompt`."""
        return self._tokens.get(prompt.id, len(prompt.token_ids) * self._tokens_per_prompt_token)

    def observe(self, rollouts: StepRollouts) -> None:
        """Take the lengths of gathered rollouts into account."""
        lengths: dict[int, list[int]] = {}
        prompt_tokens = 0
        for (group, _), record in rollouts.records.items():
            prompt = rollouts.prompts[group]
            lengths.setdefault(prompt.id, []).append(record.length)
            prompt_tokens += len(prompt.token_ids)
        for prompt_id, values in lengths.items():
            mean = sum(values) / len(values)
            before = self._tokens.pop(prompt_id, mean)
            self._tokens[prompt_id] = before + NEWEST_WEIGHT * (mean - before)
        for prompt_id in list(self._tokens)[: max(0, len(self._tokens) - MAX_PROMPTS)]:
            del self._tokens[prompt_id]
        if prompt_tokens:
            self._tokens_per_prompt_token = sum(map(sum, lengths.values())) / prompt_tokens

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps, as JSON can hold it."""
        return {
            "tokens": list(self._tokens.items()),
            "tokens_per_prompt_token": self._tokens_per_prompt_token,
        }

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned."""
        self._tokens = {int(prompt_id): float(tokens) for prompt_id, tokens in state["tokens"]}
        self._tokens_per_prompt_token = float(state["tokens_per_prompt_token"])


def deal_groups(costs: Sequence[float], replica_of_rank: Sequence[int]) -> list[list[int]]:
    """Deal groups to ranks, longest first, each to the replica and then to its rank with the least to do.

    Args:
        costs: by group.
        replica_of_rank: the engine replica that each rank generates with; ranks of one replica share its
            speed.

    Returns:
        The groups of each rank, in ascending order.
    """
    longest_first = sorted(range(len(costs)), key=lambda group: (-costs[group], group))
    # heaps of (load, number): equal loads go by number
    replicas = [(0.0, replica) for replica in sorted(set(replica_of_rank))]
    ranks: dict[int, list[tuple[float, int]]] = {replica: [] for _, replica in replicas}
    for rank, replica in enumerate(replica_of_rank):
        ranks[replica].append((0.0, rank))
    dealt: list[list[int]] = [[] for _ in replica_of_rank]
    for group in longest_first:
        replica_load, replica = heapq.heappop(replicas)
        rank_load, rank = heapq.heappop(ranks[replica])
        dealt[rank].append(group)
        heapq.heappush(replicas, (replica_load + costs[group], replica))
        heapq.heappush(ranks[replica], (rank_load + costs[group], rank))
    return [sorted(groups) for groups in dealt]


@exchangeable
@dataclass(frozen=True)
class EngineFailure:
    """A rank's engine has failed during a request."""

    message: str
    is_ready: bool  # the engine says that it would serve now
    life: int = 0  # the replica's life when it was asked: a failure from before its recovery is stale


class ReplicaStates:
    """Deals groups to the ranks of the replicas that generate."""

    def __init__(self, replica_of_rank: Sequence[int]):
        self.replica_of_rank = tuple(replica_of_rank)
        self.lost: dict[int, str] = {}  # replica -> why
        self._failures: Counter[int] = Counter()  # in a row
        self._lives: Counter[int] = Counter()  # times that a replica was recovered

    def deal(self, costs: Sequence[float], is_retry: bool = False) -> list[list[int]]:
        """Return the groups of each rank; none where its replica is lost, or has failed last if this is a
        retry and others haven't.
        """
        ranks = [rank for rank, replica in enumerate(self.replica_of_rank) if replica not in self.lost]
        if is_retry:
            ranks = [rank for rank in ranks if not self._failures[self.replica_of_rank[rank]]] or ranks
        if not ranks:
            return [[] for _ in self.replica_of_rank]
        dealt = deal_groups(costs, [self.replica_of_rank[rank] for rank in ranks])
        by_rank = dict(zip(ranks, dealt, strict=True))
        return [by_rank.get(rank, []) for rank in range(len(self.replica_of_rank))]

    def take(self, failures: Sequence[EngineFailure | None], served: Collection[int]) -> float:
        """Note how a round went; return the seconds to wait before the next.

        Args:
            failures: by rank.
            served: ranks that got something from their replicas.
        """
        failed: dict[int, list[EngineFailure]] = {}
        for replica, failure in zip(self.replica_of_rank, failures, strict=True):
            if failure is not None and failure.life == self._lives[replica]:
                failed.setdefault(replica, []).append(failure)
        pause = 0.0
        for replica in set(self.replica_of_rank):
            if replica not in failed:
                if any(self.replica_of_rank[rank] == replica for rank in served):
                    self._failures[replica] = 0
                continue
            self._failures[replica] += 1
            if self._failures[replica] >= MAX_FAILURES or not all(
                failure.is_ready for failure in failed[replica]
            ):
                self.lost[replica] = failed[replica][0].message
            else:
                pause = max(pause, FIRST_PAUSE_SECONDS * 2 ** (self._failures[replica] - 1))
        return pause

    def life(self, rank: int) -> int:
        """Return the number of the current life of a rank's replica: it has been recovered so often."""
        return self._lives[self.replica_of_rank[rank]]

    @property
    def is_any_left(self) -> bool:
        """Say whether anything generates."""
        return any(replica not in self.lost for replica in self.replica_of_rank)

    def describe_lost(self) -> str:
        """Return what is lost and why, for a message."""
        return "; ".join(f"replica {replica}: {why}" for replica, why in sorted(self.lost.items()))

    def recover(self, replica: int) -> None:
        """Let a lost replica generate again: it was restarted and holds the newest weights."""
        self.lost.pop(replica, None)
        self._failures[replica] = 0
        self._lives[replica] += 1
