"""One step's learning: from scored rollouts to applied optimizer updates.

    advantages -> plan -> move tokens -> old / reference log-probs -> correction -> token weights -> forward,
    backward, apply

Everything that decides (advantages, plans, weights) is computed alike on every rank from metadata.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megagrpo.algorithms.advantages import AdvantageResult, PenaltySums
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.metrics import Metric, finalize_metrics, merge_metrics, summarize_updates
from megagrpo.config.rollout_sections import RewardsConfig, RolloutConfig
from megagrpo.config.training_sections import UpdateConfig
from megagrpo.parallel.groups import ParallelGroups, all_gather_metadata
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.actor import Actor, AppliedUpdate
from megagrpo.policy.batch import MicroBatchBuilder
from megagrpo.policy.logprob_gap import LargestGap, LogprobGap, largest
from megagrpo.policy.loss import PolicyLoss, SequenceTerms
from megagrpo.policy.microbatches import PackingRules
from megagrpo.policy.mini_batches import MiniBatch, MiniBatchBuilder
from megagrpo.policy.prior_passes import PriorPasses, all_gather_metrics
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
    padding_fraction: float = 0.0  # padding / all tokens that a pass over the step computes
    logprob_gap: LogprobGap | None = None  # largest one between engine and actor before the first update


@dataclass
class _Step:
    """What the updates of a step are computed from."""

    mini_batches: list[MiniBatch]
    advantages: dict[SampleKey, float]
    lengths: dict[SampleKey, int]  # tokens that count in the denominator; 0: the completion is left out
    ages: dict[SampleKey, int]  # publishes between the weights that sampled it and the newest
    counters: Mapping[str, int]  # what the advantages counted
    before: dict[str, Metric]  # KL that was taken from rewards
    mismatch: dict[str, Metric]  # between engine and actor; empty where the first update measures it
    largest_gap: LargestGap
    kl_scale: float  # scales the KL to go that is subtracted from a token's advantage


class PolicyUpdater:
    """Runs the updates of a step."""

    def __init__(
        self,
        *,
        actor: Actor,
        reference: Reference | None,
        algorithm: Algorithm,
        groups: ParallelGroups,
        layout: ParallelLayout,
        builder: MicroBatchBuilder,
        rules: PackingRules,
        update: UpdateConfig,
        rollout: RolloutConfig,
        rewards: RewardsConfig,
        is_comparable: bool = True,
    ):
        """Take the models and the sections that say how they learn.

        Args:
            reference: None where no penalty needs it.
            builder: of this rank's micro-batches.
            rules: by which they are planned.
            update: how many updates a step has.
            rollout: how the engine sampled.
            rewards: whose weights some advantages need part by part.
            is_comparable: the engine's log-probs are over the same tokens as the actor's.
        """
        self.actor, self.reference, self.algorithm, self.groups = actor, reference, algorithm, groups
        self.update, self.temperature = update, rollout.temperature
        self.is_comparable = is_comparable
        self._part_weights = torch.tensor([function.weight for function in rewards.functions])
        self._mini_batches = MiniBatchBuilder(groups, layout, builder, rules, actor.model.hf.hidden_size)
        self._passes = PriorPasses(
            actor=actor,
            reference=reference,
            algorithm=algorithm,
            groups=groups,
            updates_per_step=update.updates_per_step,
            temperature=self.temperature,
            is_comparable=self.is_comparable,
        )
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
        step = self._prepare(rollouts, weight_version, before_pass)
        collected: list[dict[str, Metric]] = []
        applied: list[AppliedUpdate] = []
        trained_tokens = 0
        gap: LogprobGap | None = None
        for epoch in range(self.update.epochs_per_step):
            for place, mini_batch in enumerate(step.mini_batches):
                if not mini_batch.batches:
                    continue
                if not applied:
                    before_pass()
                loss = self._loss(step, mini_batch, is_first=not applied)
                metrics = all_gather_metrics(
                    self.groups, self.actor.forward_backward(mini_batch.batches, loss)
                )
                if not applied:
                    gap = largest(all_gather_metadata(step.largest_gap.result()))
                if before_apply is not None:
                    before_apply(
                        finalize_metrics(merge_metrics([step.mismatch, metrics])), None if applied else gap
                    )
                rate = learning_rate(epoch * len(step.mini_batches) + place)
                applied.append(self.actor.apply_gradients(rate, accepts))
                collected.append(metrics)
                trained_tokens += sum(step.lengths[key] for key in mini_batch.keys)
        self.actor.gather_parameters()
        computed = sum(mini_batch.computed_tokens for mini_batch in step.mini_batches)
        padding = sum(mini_batch.padding_tokens for mini_batch in step.mini_batches) / max(1, computed)
        return UpdateResult(self._metrics(step, collected), applied, trained_tokens, padding, gap)

    def _prepare(self, rollouts: StepRollouts, weight_version: int, before_pass: Callable[[], None]) -> _Step:
        """Compute all that comes before the first update. Collective over all ranks."""
        valid = self.algorithm.mask_completions(rollouts.valid, rollouts.cut_by_length)
        rewards = self._shaped_rewards(rollouts)
        result = self._advantages(rollouts, rewards, valid, rollouts.field_matrix("trained_tokens"))
        trains = valid if self._needs_every_sample else valid & (result.advantages != 0)
        mini_batches = self._mini_batches.build(rollouts, trains, self.update.mini_batches_per_step)
        ages = {key: weight_version - record.weight_version for key, record in rollouts.records.items()}
        self._passes.fill_terms(mini_batches, before_pass)
        gap = LargestGap()
        kept_tokens, rejected, mismatch = self._passes.compare_with_engine(mini_batches, ages, gap)
        valid = valid & ~rollouts.matrix(rejected, fill=0, dtype=torch.bool)
        lengths = {
            key: kept_tokens.get(key, record.trained_tokens) if valid[key] else 0
            for key, record in rollouts.records.items()
        }
        before: dict[str, Metric] = {}
        penalties: PenaltySums | None = None
        if self.algorithm.kl_to_go:
            totals, squares, before = self._passes.fill_kl_to_go(mini_batches)
            penalties = PenaltySums(rollouts.matrix(totals), rollouts.matrix(squares))
        elif self.algorithm.kl_in_reward:
            taken, before = self._passes.kl_penalties(mini_batches)
            rewards = rewards - rollouts.matrix(taken)
        if kept_tokens or self.algorithm.kl_in_reward:
            result = self._advantages(rollouts, rewards, valid, rollouts.matrix(lengths), penalties)
        advantages = {key: float(result.advantages[key]) for key in rollouts.records}
        return _Step(
            mini_batches,
            advantages,
            lengths,
            ages,
            result.counters,
            before,
            mismatch,
            gap,
            result.penalty_scale,
        )

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

    def _shaped_rewards(self, rollouts: StepRollouts) -> torch.Tensor:
        return self.algorithm.shape_rewards(
            rollouts.field_matrix("reward"), rollouts.field_matrix("length"), rollouts.cut_by_length
        )

    def _advantages(
        self,
        rollouts: StepRollouts,
        rewards: torch.Tensor,
        valid: torch.Tensor,
        lengths: torch.Tensor,
        penalties: PenaltySums | None = None,
    ) -> AdvantageResult:
        _, parts = rollouts.reward_parts()
        return self.algorithm.advantages(
            rewards,
            valid,
            lengths=lengths,
            reward_parts=parts,
            part_weights=self._part_weights,
            penalties=penalties,
        )

    def _loss(self, step: _Step, mini_batch: MiniBatch, is_first: bool) -> PolicyLoss:
        """Return the loss of one update; the first measures engine against actor where that is not known."""
        terms = SequenceTerms(
            step.advantages, self._token_weights(mini_batch, step.lengths), step.ages, step.kl_scale
        )
        compare = step.largest_gap if self.is_comparable and is_first and not step.mismatch else None
        return PolicyLoss(
            self.actor.model,
            self.algorithm,
            self.temperature,
            terms,
            self.reference.model if self.reference else None,
            compare,
            self.is_comparable,
        )

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

    def _metrics(self, step: _Step, collected: list[dict[str, Metric]]) -> dict[str, float]:
        """Return the step's numbers, and let a KL coefficient that adapts follow them."""
        metrics = finalize_metrics(merge_metrics([*collected, step.before, step.mismatch]))
        metrics |= summarize_updates(collected)
        if self.router_loads:
            metrics |= self.router_loads.take(len(collected))
        if "ref_kl" in metrics:
            self.algorithm.update_kl(metrics["ref_kl"])
        return metrics | {name: float(count) for name, count in step.counters.items()}
