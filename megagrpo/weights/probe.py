"""Compares engine and trainer on a fixed prompt before a published version serves: wrong weights that no
checksum sees change log-probs.

(An engine may compute with a packed or converted copy of what was acknowledged, and forget to make it anew.)
Each replica samples a completion of the same prompt, the actor scores all of them teacher-forced, and the
log-probs must agree. Until they do an engine answers nothing else.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from megagrpo.config.engine import PROBE_PROMPT_TOKENS
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder, TrainSample
from megagrpo.policy.microbatches import SampleSize, plan_microbatches
from megagrpo.types import Completion, Prompt, SamplingParams
from megagrpo.weights.publisher import PublishError, agree

# a prime: the ids spread over the vocabulary, so that most rows of the embedding's shards are touched over
# time
_STRIDE = 7919


def probe_prompt(vocab_size: int) -> Prompt:
    """Return a fixed prompt of token ids spread over the vocabulary."""
    return Prompt(
        id=0, text="", token_ids=tuple(_STRIDE * (i + 1) % vocab_size for i in range(PROBE_PROMPT_TOKENS))
    )


class ProbedEngine(Protocol):
    """What is needed of an engine."""

    def sample_probe(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Sample a completion under the version that is complete and does not serve yet."""


class LogprobProbe:
    """The comparison.

    Args:
        actor: the trained model.
        builder: of its micro-batches.
        engine: this rank's view of its replica.
        replica: its number.
        is_owner: whether this rank asks the replica.
        num_tokens: sampled by each replica.
        max_gap: largest |engine - actor| log-prob that is let pass.
    """

    def __init__(
        self,
        actor: Actor,
        builder: MicroBatchBuilder,
        engine: ProbedEngine,
        replica: int,
        is_owner: bool,
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
        self.num_tokens, self.max_gap = num_tokens, max_gap
        self.prompt = probe_prompt(actor.model.hf.vocab_size)

    def __call__(self, version: int, replicas: Collection[int]) -> dict[str, float]:
        """Compare the replicas at a version. Collective over all ranks.

        Returns:
            The largest gap, as a metric.

        Raises:
            PublishError: on all ranks alike, naming replica, token, position and version of the largest gap
                where it is too large.
        """
        what = f"weight version {version}: probe"
        asked = agree(
            lambda: self._sample(version) if self.is_owner and self.replica in replicas else None, what
        )
        samples = [
            TrainSample(
                (replica, 0),
                self.prompt.token_ids,
                np.array(token_ids, dtype=np.int64),
                np.array(logprobs, dtype=np.float32),
            )
            for replica, token_ids, logprobs in sorted(sampled for sampled in asked if sampled)
        ]
        scored = agree(lambda: self._score(samples), what)
        gaps = [gap for part in scored for gap in part]
        if len(gaps) < sum(len(sample.token_ids) for sample in samples):
            raise PublishError(
                f"{what}: {len(gaps)} tokens were scored, "
                f"{sum(len(s.token_ids) for s in samples)} were sampled"
            )
        gap, replica, position, token, engine, actor = max(
            gaps, key=lambda row: (not np.isfinite(row[0]), row[0])
        )
        if not gap <= self.max_gap:  # NaN too
            raise PublishError(
                f"{what}: replica {replica}, token {token} at position {position}: engine log-prob "
                f"{engine:.6f}, trainer {actor:.6f}, "
                f"gap {gap:.3e} is above weights.probe_max_gap {self.max_gap:.3e}"
            )
        return {"publish/probe_gap": gap}

    def _sample(self, version: int) -> tuple[int, list[int], list[float]]:
        sampling = SamplingParams(max_new_tokens=self.num_tokens, temperature=1.0, seed=0, step=version)
        completion = self.engine.sample_probe(self.prompt, sampling)
        return self.replica, completion.token_ids.tolist(), completion.logprobs.tolist()

    def _score(self, samples: Sequence[TrainSample]) -> list[tuple[float, int, int, int, float, float]]:
        """Return (gap, replica, position, token, engine's, actor's log-prob) of the tokens that this rank
        scores.

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
                rows.append((gap, batch.keys[sequence][0], *rest))
        return rows
