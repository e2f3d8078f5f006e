"""Which rank generates which group: by expected length, so that no rank waits for another that drew the long
ones.

What is generated doesn't depend on the rank, so this decides time alone. It is a function of metadata that
all ranks hold.
"""

import heapq
from collections.abc import Mapping, Sequence

from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import Prompt

# of a prompt's newest mean length in its running estimate: the policy changes, an epoch old length is a hint
NEWEST_WEIGHT = 0.5
MAX_PROMPTS = 1 << 16  # those that were seen last; more would make checkpoints grow with the data set


class LengthEstimates:
    """A running estimate of the completion length of each prompt; prompts never seen are judged by their
    own length.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}  # by prompt id, the last seen last
        self._tokens_per_prompt_token = 1.0  # of the newest rollouts

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
