"""Compares engine and trainer on prompts of the run before a published version serves: wrong weights that no
checksum sees change log-probs.

(An engine may compute with a packed or converted copy of what was acknowledged, and forget to rebuild it.)
Each replica samples a completion of each prompt, the actor scores all of them teacher-forced, and the
log-probs must agree in the mean of each replica: the largest of many rounding errors grows with their number,
and a router of experts that flips on one token is no error. A replica whose mean is too large is asked once
more, for other tokens. Until they agree an engine answers nothing else.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder, TrainSample
from megagrpo.policy.microbatches import SampleSize, plan_microbatches
from megagrpo.policy.reference import Reference
from megagrpo.types import Completion, Prompt, SamplingParams
from megagrpo.weights.publisher import PublishError, agree

NUM_PROMPTS = 4
_ATTEMPTS = 2


def choose_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of the comparison: NUM_PROMPTS, or as many as there are, from all over the set."""
    count = min(NUM_PROMPTS, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


class _Gap(NamedTuple):
    """A token's |engine - actor| log-prob, and where it is."""

    gap: float
    replica: int
    prompt: int  # its place among the prompts
    position: int
    token: int
    engine: float
    actor: float


class ProbedEngine(Protocol):
    """What is needed of an engine."""

    def sample_probe(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Sample a completion under the version that is complete and does not serve yet."""


class LogprobProbe:
    """The comparison.

    Args:
        actor: the model whose weights are published.
        builder: of its micro-batches.
        engine: this rank's view of its replica.
        replica: its number.
        is_owner: whether this rank asks the replica.
        prompts: that are completed; the same on all ranks.
        num_tokens: of each completion.
        max_gap: largest mean |engine - actor| log-prob of a replica's tokens that is let pass.
    """

    def __init__(
        self,
        actor: Actor | Reference,
        builder: MicroBatchBuilder,
        engine: ProbedEngine,
        replica: int,
        is_owner: bool,
        prompts: Sequence[Prompt],
        num_tokens: int,
        max_gap: float,
    ):
        self.actor, self.builder, self.engine, self.replica, self.is_owner = (
            actor,
            builder,
            engine,
            replica,
            is_owner,
        )
        self.prompts, self.num_tokens, self.max_gap = prompts, num_tokens, max_gap

    def __call__(self, version: int, replicas: Collection[int]) -> dict[str, float]:
        """Compare the replicas at a version. Collective over all ranks.

        Returns:
            As metrics: the largest mean of a replica, the largest gap of a token, and how many replicas were
            asked twice.

        Raises:
            PublishError: on all ranks alike, where a replica's mean is too large both times: replica, mean,
                and the token with the largest gap.
        """
        asked, retried = set(replicas), 0
        for attempt in range(_ATTEMPTS):
            gaps = self._compare(version, asked, attempt)
            means = {
                replica: float(np.mean([one.gap for one in gaps if one.replica == replica]))
                for replica in sorted(asked)
            }
            asked = {replica for replica, mean in means.items() if not mean <= self.max_gap}  # NaN too
            if attempt == 0:
                found = {
                    "publish/probe_gap": max(means.values(), key=_finite_first),
                    "publish/probe_gap_max": max((one.gap for one in gaps), key=_finite_first),
                }
                retried = len(asked)
            if not asked:
                return {**found, "publish/probe_retries": retried}
        worst = max(means, key=lambda replica: _finite_first(means[replica]))
        largest = max((one for one in gaps if one.replica == worst), key=lambda one: _finite_first(one.gap))
        raise PublishError(
            f"weight version {version}: probe: replica {worst}: the mean gap {means[worst]:.3e} is above "
            f"weights.probe_max_gap {self.max_gap:.3e}, twice; largest: token {largest.token} at position "
            f"{largest.position} of prompt {self.prompts[largest.prompt].id}: engine log-prob "
            f"{largest.engine:.6f}, trainer {largest.actor:.6f}"
        )

    def _compare(self, version: int, replicas: Collection[int], attempt: int) -> list[_Gap]:
        """Return the gaps of all tokens that the replicas sample. Collective over all ranks."""
        what = f"weight version {version}: probe"
        is_asked = self.is_owner and self.replica in replicas
        told = agree(lambda: self._sample(version, attempt) if is_asked else [], what)
        samples = [
            TrainSample(
                (replica, prompt),
                self.prompts[prompt].token_ids,
                np.array(token_ids, dtype=np.int64),
                np.array(logprobs, dtype=np.float32),
            )
            for replica, prompt, token_ids, logprobs in sorted(row for rows in told for row in rows)
        ]
        scored = agree(lambda: self._score(samples), what)
        gaps = [_Gap(*gap) for part in scored for gap in part]
        sampled = sum(len(sample.token_ids) for sample in samples)
        if len(gaps) < sampled:
            raise PublishError(f"{what}: {len(gaps)} tokens were scored, {sampled} were sampled")
        return gaps

    def _sample(self, version: int, attempt: int) -> list[tuple[int, int, list[int], list[float]]]:
        """Return (replica, place of the prompt, token ids, log-probs) of this rank's replica."""
        sampling = SamplingParams(max_new_tokens=self.num_tokens, temperature=1.0, seed=attempt, step=version)
        rows = []
        for place, prompt in enumerate(self.prompts):
            completion = self.engine.sample_probe(prompt, sampling)
            rows.append((self.replica, place, completion.token_ids.tolist(), completion.logprobs.tolist()))
        return rows

    def _score(self, samples: Sequence[TrainSample]) -> list[tuple[float, int, int, int, int, float, float]]:
        """Return the fields of _Gap of the tokens that this rank scores.

        Every data parallel rank runs the same micro-batches (experts are shared between them), the first one
        tells.
        """
        groups, rules = self.actor.model.groups, self.builder.rules
        sizes = [
            SampleSize(number, len(sample.prompt_ids), len(sample.token_ids))
            for number, sample in enumerate(samples)
        ]
        plan = plan_microbatches(sizes, 1, rules, self.actor.model.hf.hidden_size)[0]
        batches = [self.builder.build(micro, samples.__getitem__, len(samples)) for micro in plan]
        scored = self.actor.logprobs(batches, 1.0)
        if not groups.reports_losses or groups.dp_rank != 0:
            return []
        rows = []
        for batch, logprobs in zip(batches, scored, strict=True):
            gaps = (logprobs.double() - batch.rollout_logprobs.double()).abs().tolist()
            columns = (batch.sequence_ids, batch.positions, batch.targets, batch.rollout_logprobs, logprobs)
            for gap, sequence, *rest in zip(gaps, *(column.tolist() for column in columns), strict=True):
                rows.append((gap, *batch.keys[sequence], *rest))
        return rows


def _finite_first(gap: float) -> tuple[bool, float]:
    """Order gaps so that one that is no number is the largest."""
    return not np.isfinite(gap), gap
