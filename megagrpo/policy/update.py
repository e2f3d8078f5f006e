"""One step's learning: from scored rollouts to applied optimizer updates.

    advantages -> plan -> move tokens -> old / reference log-probs -> correction -> token weights -> forward,
    backward, apply

Everything that decides (advantages, plans, weights) is computed alike on every rank from metadata. The
per-token tensors of the old policy and the reference stay on the last pipeline stage, which alone needs them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.checks import check_logprobs
from megagrpo.algorithms.metrics import Metric, finalize_metrics, merge_metrics, summarize_updates
from megagrpo.config.schema import Config
from megagrpo.parallel.groups import ParallelGroups, all_gather_metadata
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.parallel.token_shard import sum_sequences
from megagrpo.policy.actor import Actor, AppliedUpdate
from megagrpo.policy.batch import MicroBatch, MicroBatchBuilder, TrainSample
from megagrpo.policy.exchange import exchange_completions
from megagrpo.policy.logprob_gap import LargestGap, LogprobGap, largest
from megagrpo.policy.loss import PolicyLoss, SequenceTerms
from megagrpo.policy.microbatches import MicroBatchPlan, PackingRules, SampleSize, plan_microbatches
from megagrpo.policy.reference import Reference
from megagrpo.policy.router_load import RouterLoads
from megagrpo.rollout.rollouts import SampleKey, StepRollouts

BeforeApply = Callable[[Mapping[str, float], LogprobGap | None], None]
"""Takes an update's metrics and, before the first update of a step, the largest gap between engine and
actor.
"""


@dataclass(frozen=True)
class UpdateResult:
    """What a step's updates came to, the same on all ranks."""

    metrics: dict[str, float]  # over all updates of the step
    applied: list[AppliedUpdate] = field(default_factory=list)
    trained_tokens: int = 0  # completion tokens that went through the backward pass, each pass counted
    logprob_gap: LogprobGap | None = None  # largest one between engine and actor before the first update


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer update."""

    groups: Sequence[int]
    keys: Sequence[SampleKey]  # of the samples that are trained, on all replicas
    batches: Sequence[MicroBatch]  # of this rank's replica


def sum_by_key(parts: Iterable[Mapping[SampleKey, float]]) -> dict[SampleKey, float]:
    """Add up what the context parallel ranks found of each sample on their tokens."""
    total: dict[SampleKey, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


class PolicyUpdater:
    """Runs the updates of a step."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        reference: Reference | None,
        algorithm: Algorithm,
        groups: ParallelGroups,
        layout: ParallelLayout,
        builder: MicroBatchBuilder,
        rules: PackingRules,
    ):
        self.config, self.actor, self.reference, self.algorithm = config, actor, reference, algorithm
        self.groups, self.layout, self.builder, self.rules = groups, layout, builder, rules
        self.temperature = config.rollout.temperature
        self.router_loads = RouterLoads(actor.model) if actor.model.hf.num_experts else None

    def run(
        self,
        rollouts: StepRollouts,
        learning_rate: Callable[[int], float],
        before_apply: BeforeApply | None = None,
        before_pass: Callable[[], None] = lambda: None,
        accepts: Callable[[float], bool] | None = None,
        weight_version: int = 0,
    ) -> UpdateResult:
        """Train on one step's groups. Collective over all ranks.

        Args:
            rollouts: the groups.
            weight_version: of the actor now: what the age of a completion is counted from.
            learning_rate: of the k-th update of this step; one without anything to train is counted too.
            before_apply: called before an update is applied; may raise to stop the run with the weights
                untouched.
            before_pass: called before each pass of micro-batches through the pipeline, until an update is
                applied; may raise as well.
            accepts: called with the gradient norm of an update after `before_apply`; False skips the update.
                All ranks must answer alike.
        """
        if not rollouts.records:
            # dynamic sampling found no group with a signal: nothing to learn in this step
            return UpdateResult({})
        valid = self.algorithm.mask_completions(rollouts.valid, rollouts.cut_by_length)
        rewards = self._shaped_rewards(rollouts)
        advantages, counters = self._advantages(rollouts, rewards, valid)
        mini_batches = self._mini_batches(rollouts, valid, advantages)
        ages = {key: weight_version - record.weight_version for key, record in rollouts.records.items()}
        self._fill_terms(mini_batches, before_pass)
        before: dict[str, Metric] = {}
        if self.algorithm.kl_in_reward:
            penalties, before = self._kl_penalties(mini_batches)
            rewards = rewards - rollouts.matrix(penalties)
        largest_gap = LargestGap()
        kept_tokens, rejected, mismatch = self._compare_with_engine(mini_batches, ages, largest_gap)
        lengths = {key: kept_tokens.get(key, record.length) for key, record in rollouts.records.items()}
        if rejected or self.algorithm.kl_in_reward:
            valid = valid & ~rollouts.matrix(rejected, fill=0, dtype=torch.bool)
            advantages, counters = self._advantages(rollouts, rewards, valid)
        advantage_of = {key: float(advantages[key]) for key in rollouts.records}
        lengths = {key: length if valid[key] else 0 for key, length in lengths.items()}

        collected: list[dict[str, Metric]] = []
        applied: list[AppliedUpdate] = []
        trained_tokens = 0
        gap: LogprobGap | None = None
        for epoch in range(self.config.update.epochs_per_step):
            for place, mini_batch in enumerate(mini_batches):
                if not mini_batch.batches:
                    continue
                terms = SequenceTerms(advantage_of, self._token_weights(mini_batch, lengths), ages)
                reference = self.reference.model if self.reference else None
                is_comparable = not self.config.rollout.is_narrowed
                compare = largest_gap if is_comparable and not applied and not mismatch else None
                if not applied:
                    before_pass()
                loss = PolicyLoss(
                    self.actor.model,
                    self.algorithm,
                    self.temperature,
                    terms,
                    reference,
                    compare,
                    is_comparable,
                )
                metrics = self._all_gather_metrics(self.actor.forward_backward(mini_batch.batches, loss))
                if not applied:
                    gap = largest(all_gather_metadata(largest_gap.result()))
                if before_apply is not None:
                    before_apply(
                        finalize_metrics(merge_metrics([mismatch, metrics])), None if applied else gap
                    )
                applied.append(
                    self.actor.apply_gradients(learning_rate(epoch * len(mini_batches) + place), accepts)
                )
                collected.append(metrics)
                trained_tokens += sum(lengths[key] for key in mini_batch.keys)
        self.actor.gather_parameters()
        metrics = finalize_metrics(merge_metrics([*collected, before, mismatch]))
        metrics |= summarize_updates(collected)
        if self.router_loads:
            metrics |= self.router_loads.take(len(applied))
        if "ref_kl" in metrics:
            self.algorithm.update_kl(metrics["ref_kl"])
        return UpdateResult(
            {**metrics, **{name: float(count) for name, count in counters.items()}},
            applied,
            trained_tokens,
            gap,
        )

    # ---- before the first micro-batch

    def _shaped_rewards(self, rollouts: StepRollouts) -> torch.Tensor:
        return self.algorithm.shape_rewards(
            rollouts.field_matrix("reward"), rollouts.field_matrix("length"), rollouts.cut_by_length
        )

    def _advantages(
        self, rollouts: StepRollouts, rewards: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, Mapping[str, int]]:
        _, parts = rollouts.reward_parts()
        weights = torch.tensor([function.weight for function in self.config.rewards.functions])
        result = self.algorithm.advantages(
            rewards, valid, lengths=rollouts.field_matrix("length"), reward_parts=parts, part_weights=weights
        )
        return result.advantages, result.counters

    def _mini_batches(
        self, rollouts: StepRollouts, valid: torch.Tensor, advantages: torch.Tensor
    ) -> list[MiniBatch]:
        """Plan all updates of a pass and fetch the tokens that this replica trains. Collective over all
        ranks.
        """
        trains = valid if self._needs_every_sample else valid & (advantages != 0)
        plans: list[tuple[Sequence[int], list[SampleKey], list[list[MicroBatchPlan]]]] = []
        for chunk in np.array_split(
            np.arange(len(rollouts.prompts)), self.config.update.mini_batches_per_step
        ):
            keys = [key for key in rollouts.records if key[0] in set(chunk.tolist()) and trains[key]]
            sizes = [
                SampleSize(key[0], len(rollouts.prompts[key[0]].token_ids), rollouts.records[key].length)
                for key in keys
            ]
            plan = (
                plan_microbatches(sizes, self.layout.dp, self.rules, self.actor.model.hf.hidden_size)
                if keys
                else []
            )
            plans.append((chunk.tolist(), keys, plan))
        samples = self._fetch(rollouts, plans)
        return [
            MiniBatch(
                chunk,
                keys,
                [
                    self.builder.build(micro, lambda i, keys=keys: samples[keys[i]], len(keys))
                    for micro in plan[self.groups.dp_rank]
                ],
            )
            if plan
            else MiniBatch(chunk, keys, [])
            for chunk, keys, plan in plans
        ]

    @property
    def _needs_every_sample(self) -> bool:
        """Whether a completion with advantage 0 must be computed: it has a gradient, or its advantage may
        still change.
        """
        return (
            not self.algorithm.can_skip_zero_advantage
            or self.algorithm.kl_in_reward
            or self.algorithm.correction_before_advantages
        )

    def _fetch(self, rollouts: StepRollouts, plans: list) -> dict[SampleKey, TrainSample]:
        destinations = {
            keys[index]: self.layout.ranks_of_replica(dp)
            for _, keys, plan in plans
            for dp, micro_batches in enumerate(plan)
            for micro in micro_batches
            for tree in micro
            for index in tree.samples
        }
        records = [record for key, record in rollouts.records.items() if key in destinations]
        tokens = exchange_completions(records, destinations, rollouts.local)
        return {
            key: TrainSample(key, rollouts.prompts[key[0]].token_ids, *data) for key, data in tokens.items()
        }

    @property
    def _old_equals_actor(self) -> bool:
        """Whether the first forward of the update is that of the old policy, so that its own log-probs
        serve as the old ones.
        """
        single = self.config.update.updates_per_step == 1
        return single and not self.algorithm.config.correction.enabled and not self.algorithm.kl_in_reward

    def _fill_terms(self, mini_batches: Sequence[MiniBatch], before_pass: Callable[[], None]) -> None:
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

    def _kl_penalties(
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
        return penalties, self._all_gather_metrics(measured)

    def _compare_with_engine(
        self,
        mini_batches: Sequence[MiniBatch],
        ages: Mapping[SampleKey, int],
        largest_gap: LargestGap,
    ) -> tuple[dict[SampleKey, int], dict[SampleKey, bool], dict[str, Metric]]:
        """Measure the mismatch of engine and actor and apply the rollout correction.

        Only where old log-probs were computed: otherwise the loss of the first update measures it with its
        own. Nothing is measured where top_p or top_k narrow the engine's distribution. Collective over all
        ranks.

        Returns:
            Kept tokens and rejections by sample (both empty without a correction), and the diagnostics.
        """
        if (
            self._old_equals_actor
            or self.algorithm.config.old_logprobs == "engine"
            or not self.algorithm.needs_old_logprobs
            or self.config.rollout.is_narrowed
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
        return kept, rejected if any(rejected.values()) else {}, self._all_gather_metrics(diagnostics)

    def _reported_batches(self, mini_batches: Sequence[MiniBatch]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches where its numbers enter sums over all ranks."""
        if self.groups.reports_losses:
            for mini_batch in mini_batches:
                yield from mini_batch.batches

    def _token_weights(
        self, mini_batch: MiniBatch, lengths: Mapping[SampleKey, int]
    ) -> dict[SampleKey, float]:
        """Return the weight of each token by sample: the one global denominator of the mini-batch, skipped
        samples included.
        """
        members = set(mini_batch.groups)
        keys = [key for key in lengths if key[0] in members]
        weights = self.algorithm.token_weights(
            torch.tensor([lengths[key] for key in keys]), torch.tensor([key[0] for key in keys])
        )
        return dict(zip(keys, weights.tolist(), strict=True))

    def _all_gather_metrics(self, parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
        """Merge metrics of all micro-batches and replicas. Collective over all ranks."""
        mine = merge_metrics(parts) if self.groups.reports_losses else {}
        on_cpu = {
            name: Metric(metric.reduction, metric.value.cpu(), metric.count.cpu())
            for name, metric in mine.items()
        }
        return merge_metrics(all_gather_metadata(on_cpu))
