"""The passes before a step's first update: log-probs of the old policy and the reference, the KL that is
taken from rewards, and how far engine and actor are apart.

The per-token tensors stay on the last pipeline stage, which alone needs them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.algorithm_checks import check_logprobs
from megagrpo.algorithms.metrics import Metric, merge_metrics
from megagrpo.parallel.groups import ParallelGroups, all_gather_metadata
from megagrpo.parallel.token_shard import sum_following, sum_sequences
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.logprob_gap import LargestGap
from megagrpo.policy.mini_batches import MiniBatch
from megagrpo.policy.reference import Reference
from megagrpo.rollout.rollouts import SampleKey


def sum_by_key(parts: Iterable[Mapping[SampleKey, float]]) -> dict[SampleKey, float]:
    """Add up what the context parallel ranks found of each sample on their tokens."""
    total: dict[SampleKey, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def all_gather_metrics(groups: ParallelGroups, parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics of all micro-batches and replicas. Collective over all ranks."""
    mine = merge_metrics(parts) if groups.reports_losses else {}
    told = {
        name: (metric.reduction, float(metric.value), float(metric.count)) for name, metric in mine.items()
    }
    return merge_metrics(
        {
            name: Metric(reduction, *(torch.tensor(one, dtype=torch.float64) for one in numbers))
            for name, (reduction, *numbers) in part.items()
        }
        for part in all_gather_metadata(told)
    )


class PriorPasses:
    """What the losses of a step need to know beforehand."""

    def __init__(
        self,
        *,
        actor: Actor,
        reference: Reference | None,
        algorithm: Algorithm,
        groups: ParallelGroups,
        updates_per_step: int,
        temperature: float,
        is_comparable: bool,
    ):
        """Take the models that the passes run through.

        Args:
            temperature: of the log-probs.
            is_comparable: engine and actor mean the same by a log-prob.
        """
        self.actor, self.reference, self.algorithm, self.groups = actor, reference, algorithm, groups
        self.updates_per_step, self.temperature = updates_per_step, temperature
        self.is_comparable = is_comparable

    @property
    def _old_equals_actor(self) -> bool:
        """Whether the first forward of the update is that of the old policy, so that its own log-probs
        serve as the old ones.
        """
        single = self.updates_per_step == 1
        return single and not self.algorithm.config.correction.enabled and not self.algorithm.kl_in_reward

    def fill_terms(self, mini_batches: Sequence[MiniBatch], before_pass: Callable[[], None]) -> None:
        """Compute what the losses need of the old policy and the reference, for all micro-batches of the
        step.
        """
        batches = [batch for mini_batch in mini_batches for batch in mini_batch.batches]
        for batch in batches if self.groups.is_last_stage else ():
            check_logprobs("rollout_logprobs", batch.rollout_logprobs, len(batch.targets), batch.sequence_ids)
        if not batches:
            return
        if self.algorithm.config.old_logprobs == "engine":
            for batch in batches:
                batch.terms.old_logprobs = batch.rollout_logprobs
        elif self.algorithm.needs_old_logprobs and not self._old_equals_actor:
            before_pass()
            for batch, old in zip(
                batches, self.actor.logprobs(batches, self.temperature), strict=self.groups.is_last_stage
            ):
                batch.terms.old_logprobs = old
        if self.reference is not None:
            before_pass()
        if self.reference is not None and self.algorithm.needs_exact_kl:
            for batch, hidden in zip(
                batches, self.reference.hidden_rows(batches), strict=self.groups.is_last_stage
            ):
                batch.terms.ref_hidden = hidden
        elif self.reference is not None:
            for batch, logprobs in zip(
                batches, self.reference.logprobs(batches, self.temperature), strict=self.groups.is_last_stage
            ):
                batch.terms.ref_logprobs = logprobs

    def kl_penalties(
        self, mini_batches: Sequence[MiniBatch]
    ) -> tuple[dict[SampleKey, float], dict[str, Metric]]:
        """Return what KL takes from each completion's reward, and its metric. Collective over all ranks."""
        mine: dict[SampleKey, float] = {}
        measured: list[Mapping[str, Metric]] = []
        for batch in self._reported_batches(mini_batches):
            old, ref = batch.terms.old_logprobs, batch.terms.ref_logprobs
            penalty = self.algorithm.kl_penalty(old, ref, batch.sequence_ids, batch.num_sequences)
            mine |= dict(zip(batch.keys, penalty.tolist(), strict=True))
            measured.append(self.algorithm.measure_kl_penalty(old, ref))
        penalties = sum_by_key(all_gather_metadata(mine))
        return penalties, all_gather_metrics(self.groups, measured)

    def fill_kl_to_go(
        self, mini_batches: Sequence[MiniBatch]
    ) -> tuple[dict[SampleKey, float], dict[SampleKey, float], dict[str, Metric]]:
        """Compute what KL takes at each token and behind it, K_t, for all rows of the step; what a correction
        masks has it too, and counts in no sum. Collective over all ranks.

        Returns:
            The sums of K_t and of its square over each sample's loss tokens, and the metric of the KL.
        """
        totals: dict[SampleKey, float] = {}
        squares: dict[SampleKey, float] = {}
        measured: list[Mapping[str, Metric]] = []
        for batch in (
            batch for mini_batch in mini_batches for batch in mini_batch.batches if self.groups.is_last_stage
        ):
            old, ref = batch.terms.old_logprobs, batch.terms.ref_logprobs
            penalty = self.algorithm.kl_token_penalty(old, ref)
            rows = sum_following(
                penalty, batch.sequence_ids, batch.chunks, batch.num_sequences, self.groups.cp
            )
            batch.terms.kl_to_go = rows.to(penalty.device)
            counted = rows if batch.terms.keep is None else rows * batch.terms.keep.cpu()
            for sums, values in ((totals, counted), (squares, counted.square())):
                found = values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids.cpu(), values)
                sums |= dict(zip(batch.keys, found.tolist(), strict=True))
            measured.append(self.algorithm.measure_kl_penalty(old, ref))
        gathered = all_gather_metadata((totals, squares) if self.groups.reports_losses else ({}, {}))
        return (
            sum_by_key(part for part, _ in gathered),
            sum_by_key(part for _, part in gathered),
            all_gather_metrics(self.groups, measured),
        )

    def compare_with_engine(
        self,
        mini_batches: Sequence[MiniBatch],
        ages: Mapping[SampleKey, int],
        largest_gap: LargestGap,
    ) -> tuple[dict[SampleKey, int], dict[SampleKey, bool], dict[str, Metric]]:
        """Measure the mismatch of engine and actor and apply the rollout correction.

        Only where old log-probs were computed: otherwise the loss of the first update measures it with its
        own. Nothing is measured where top_p or top_k narrow vLLM's log-probs. Collective over all
        ranks.

        Returns:
            Kept tokens and rejections by sample (both empty without a correction), and the diagnostics.
        """
        if (
            self._old_equals_actor
            or self.algorithm.config.old_logprobs == "engine"
            or not self.algorithm.needs_old_logprobs
            or not self.is_comparable
        ):
            return {}, {}, {}
        kept: dict[SampleKey, int] = {}
        rejected: dict[SampleKey, bool] = {}
        diagnostics: list[Mapping[str, Metric]] = []
        for batch in (
            batch for mini_batch in mini_batches for batch in mini_batch.batches if self.groups.is_last_stage
        ):
            terms = batch.terms
            result = self.algorithm.correct(
                terms.old_logprobs,
                batch.rollout_logprobs,
                batch.sequence_ids,
                batch.num_sequences,
                sequence_sum=lambda values, batch=batch: sum_sequences(
                    values, batch.sequence_ids, batch.num_sequences, self.groups.cp
                ),
                positions=batch.positions,
                policy_age=batch.per_row(ages, torch.int64),
            )
            diagnostics.append(result.diagnostics)
            largest_gap.add(
                batch, torch.arange(len(batch.targets), device=batch.targets.device), terms.old_logprobs, ages
            )
            if self.algorithm.config.correction.enabled:
                terms.keep, terms.correction_weights = result.keep, result.weights
                counts = torch.zeros(batch.num_sequences).index_add(
                    0, batch.sequence_ids.cpu(), result.keep.cpu().float()
                )
                kept |= dict(zip(batch.keys, counts.int().tolist(), strict=True))
                rejected |= dict(zip(batch.keys, result.rejected.tolist(), strict=True))
        gathered = all_gather_metadata((kept, rejected) if self.groups.reports_losses else ({}, {}))
        kept = sum_by_key(part for part, _ in gathered)
        rejected = {key: flag for _, part in gathered for key, flag in part.items()}
        return kept, rejected if any(rejected.values()) else {}, all_gather_metrics(self.groups, diagnostics)

    def _reported_batches(self, mini_batches: Sequence[MiniBatch]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches where its numbers enter sums over all ranks."""
        if self.groups.reports_losses:
            for mini_batch in mini_batches:
                yield from mini_batch.batches
