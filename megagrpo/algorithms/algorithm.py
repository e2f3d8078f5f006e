"""One algorithm: advantages, token loss, KL and entropy as the configuration combines them.

What the trainer calls, in this order: `shape_rewards`, `advantages`, (`correct` where old and rollout
log-probs differ), then for each mini-batch `token_weights` once and for each micro-batch `token_loss` and
`aggregate_loss`; at the step's end `update_kl`. Where `correction_before_advantages` is true, `correct` comes
first and its rejected completions are invalid for the advantages.
"""

from collections.abc import Callable

from torch import Tensor

from megagrpo.algorithms.advantages import ADVANTAGES, AdvantageResult, PenaltySums, compute_advantages
from megagrpo.algorithms.aggregation import compute_token_weights
from megagrpo.algorithms.algorithm_checks import check_algorithm_config
from megagrpo.algorithms.correction import CorrectionResult, compute_correction
from megagrpo.algorithms.kl import (
    add_score_term,
    compute_k3,
    compute_kl_penalty,
    compute_token_penalty,
    estimate_kl,
    update_kl_coef,
)
from megagrpo.algorithms.losses import LOSSES, LossInputs, LossOutput, exp_log_ratio
from megagrpo.algorithms.metrics import Metric, measure
from megagrpo.algorithms.overlong import compute_overlong_penalty, mask_overlong
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import ConfigError, UserError


class Algorithm:
    """The configured algorithm. Its only state is `kl_coef`, a plain float that a checkpoint keeps."""

    def __init__(self, config: AlgorithmConfig, completions_per_prompt: int, max_new_tokens: int):
        """Resolve the registered parts; ConfigError lists every problem of the section."""
        problems = check_algorithm_config(config, completions_per_prompt, max_new_tokens)
        if problems:
            raise ConfigError(problems)
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.kl_coef = config.kl.coef
        self._loss = LOSSES.find(config.loss)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term needs the reference model; otherwise it is not built."""
        return self.config.kl.coef > 0

    @property
    def needs_exact_kl(self) -> bool:
        """Whether the KL term is the full-vocabulary one: `token_loss` takes `exact_kl`, not
        `ref_logprobs`.
        """
        return self.needs_reference and self.config.kl.estimator == "exact"

    @property
    def kl_in_loss(self) -> bool:
        """Whether KL is a term of the loss."""
        return self.needs_reference and self.config.kl.placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether KL is taken from the rewards: old and reference log-probs are needed before the
        advantages.
        """
        return self.needs_reference and self.config.kl.placement == "reward"

    @property
    def kl_to_go(self) -> bool:
        """Whether KL in the reward is taken token by token: `advantages` takes `penalties`, and a token's
        advantage holds the KL of it and of all tokens behind it.
        """
        return self.kl_in_reward and ADVANTAGES.find(self.config.advantages).kl_to_go

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy with its gradient."""
        return self.config.entropy_coef != 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether anything reads the actor's log-probs before the update; otherwise they need not be
        computed.
        """
        uses = self._loss.uses_old_logprobs and self.config.old_logprobs == "actor"
        return uses or self.config.correction.enabled or self.kl_in_reward

    @property
    def correction_before_advantages(self) -> bool:
        """Whether sequences can be rejected, so that the correction must be known before the group
        statistics.
        """
        return self.config.correction.rejects_sequences

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether `token_loss` needs a sequence's tokens together; otherwise any rows of a micro-batch
        give their own losses.
        """
        return self._loss.needs_whole_sequences

    @property
    def can_skip_zero_advantage(self) -> bool:
        """Whether a completion with advantage 0 need not be computed: it adds exactly 0 to the loss and to
        every gradient.

        It still counts in denominators; so where a correction masks tokens it must be computed, for the mask
        to count it.
        """
        adds_nothing = self._loss.zero_at_zero_advantage and not self.kl_in_loss and not self.needs_entropy
        return adds_nothing and not self.config.correction.masks

    def shape_rewards(self, rewards: Tensor, lengths: Tensor, finish_by_length: Tensor) -> Tensor:
        """Return `rewards` [N, G] with the soft overlong penalty added (unchanged where it is off)."""
        overlong = self.config.overlong
        if overlong.penalty == 0:
            return rewards
        buffer = overlong.buffer_of(self.max_new_tokens)
        return rewards + compute_overlong_penalty(
            lengths, finish_by_length, self.max_new_tokens, buffer, overlong.penalty
        )

    def mask_completions(self, valid: Tensor, finish_by_length: Tensor) -> Tensor:
        """Return `valid` [N, G] without the completions that overlong masking takes out."""
        return mask_overlong(valid, finish_by_length) if self.config.overlong.mask else valid

    def kl_penalty(
        self, old_logprobs: Tensor, ref_logprobs: Tensor, sequence_ids: Tensor, num_sequences: int
    ) -> Tensor:
        """Return what KL takes from each completion's reward [num_sequences] float64 (subtract it); see
        `compute_kl_penalty`.
        """
        return compute_kl_penalty(
            old_logprobs, ref_logprobs, sequence_ids, num_sequences, self.config.kl, self.kl_coef
        )

    def kl_token_penalty(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Return what KL takes from the reward at each token [T] float64; see `compute_token_penalty`."""
        return compute_token_penalty(old_logprobs, ref_logprobs, self.config.kl, self.kl_coef)

    def measure_kl_penalty(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> dict[str, Metric]:
        """Measure `ref_kl` of KL in the reward on a micro-batch's tokens [T], for the report and for
        `update_kl`.
        """
        kl = estimate_kl(
            old_logprobs.detach(), ref_logprobs, self.config.kl.estimator, self.config.kl.linear_above
        )
        return {"ref_kl": measure("ref_kl", kl)}

    def advantages(
        self,
        rewards: Tensor,
        valid: Tensor,
        *,
        lengths: Tensor | None = None,
        reward_parts: Tensor | None = None,
        part_weights: Tensor | None = None,
        penalties: PenaltySums | None = None,
    ) -> AdvantageResult:
        """Compute advantages [N, G]; see `compute_advantages`."""
        return compute_advantages(
            rewards,
            valid,
            self.config,
            lengths=lengths,
            reward_parts=reward_parts,
            part_weights=part_weights,
            penalties=penalties,
        )

    def correct(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        sequence_ids: Tensor,
        num_sequences: int,
        *,
        sequence_sum: Callable[[Tensor], Tensor] | None = None,
        positions: Tensor | None = None,
        policy_age: Tensor | None = None,
    ) -> CorrectionResult:
        """Compute the rollout correction; see `compute_correction`."""
        return compute_correction(
            old_logprobs,
            rollout_logprobs,
            sequence_ids,
            num_sequences,
            self.config.correction,
            sequence_sum=sequence_sum,
            positions=positions,
            policy_age=policy_age,
        )

    def token_weights(self, lengths: Tensor, group_ids: Tensor) -> Tensor:
        """Compute the weight of each token of every sequence of a mini-batch [B]; see
        `compute_token_weights`.
        """
        return compute_token_weights(
            lengths, group_ids, self.config.aggregation, self.config.aggregation_constant
        )

    def token_loss(self, inputs: LossInputs) -> LossOutput:
        """Compute policy loss + KL - entropy bonus per token, unreduced [T], with the metrics of all three.

        Raises:
            UserError: an input that the configuration needs is None (its field is named).
        """
        output = self._loss(inputs)
        policy = output.loss if inputs.correction_weights is None else output.loss * inputs.correction_weights
        loss, terms = policy, {"policy": policy.detach()}
        metrics = {**measure_policy(inputs), **output.metrics}
        if self.kl_in_loss:
            kl = self._reference_kl(inputs)
            terms["kl"] = self.kl_coef * kl.detach()
            metrics["ref_kl"] = measure("ref_kl", kl)
            loss = loss + self.kl_coef * kl
        if self.needs_entropy:
            entropy = _required("entropy", inputs.entropy, "algorithm.entropy_coef is not 0")
            terms["entropy"] = -self.config.entropy_coef * entropy.detach()
            loss = loss - self.config.entropy_coef * entropy
        return LossOutput(loss, metrics, terms)

    def update_kl(self, measured_kl: float) -> None:
        """Move an adaptive coefficient after a step whose global mean KL per token (metric `ref_kl`) was
        `measured_kl`.
        """
        self.kl_coef = update_kl_coef(self.kl_coef, measured_kl, self.config.kl)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned; a fixed coefficient stays that of the configuration."""
        if self.config.kl.adaptive_target is not None:
            self.kl_coef = float(state["kl_coef"])

    def _reference_kl(self, inputs: LossInputs) -> Tensor:
        if self.needs_exact_kl:
            return _required("exact_kl", inputs.exact_kl, "algorithm.kl.estimator is exact")
        reference = _required("ref_logprobs", inputs.ref_logprobs, "algorithm.kl.coef is not 0")
        kl = estimate_kl(
            inputs.actor_logprobs, reference, self.config.kl.estimator, self.config.kl.linear_above
        )
        return add_score_term(kl, inputs.actor_logprobs) if self.config.kl.score_term else kl


def measure_policy(inputs: LossInputs) -> dict[str, Metric]:
    """Measure how far the actor has moved on these tokens; every loss reports these metrics."""
    log_ratio = inputs.log_ratio().detach()
    ratio = exp_log_ratio(log_ratio)
    metrics = {
        "ratio": measure("ratio", ratio),
        "ratio_max": measure("ratio_max", ratio),
        "ratio_min": measure("ratio_min", ratio),
        "old_kl": measure("old_kl", compute_k3(log_ratio)),
    }
    if inputs.entropy is not None:
        metrics["entropy"] = measure("entropy", inputs.entropy)
    if inputs.rollout_logprobs is not None:
        gap = (inputs.actor_logprobs.detach() - inputs.rollout_logprobs).abs()
        metrics["actor_rollout_gap"] = measure("actor_rollout_gap", gap)
        metrics["actor_rollout_gap_max"] = measure("actor_rollout_gap_max", gap)
    return metrics


def _required(name: str, value: Tensor | None, reason: str) -> Tensor:
    if value is None:
        raise UserError(f"{name}: missing; needed because {reason}")
    return value
