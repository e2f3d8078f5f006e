"""The loss of one micro-batch on the last pipeline stage: log-probs, the algorithm's token loss, the
weighted sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megagrpo.algorithms.aggregation import aggregate_loss
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.diagnostics import measure_mismatch
from megagrpo.algorithms.losses import LossInputs
from megagrpo.algorithms.metrics import Metric, merge_metrics
from megagrpo.models.stage import StageModel
from megagrpo.ops.exact_kl import linear_exact_kl
from megagrpo.ops.token_loss import fits_one_chunk, linear_token_loss
from megagrpo.parallel.token_shard import sum_sequences
from megagrpo.policy.batch import MicroBatch, RowTerms
from megagrpo.policy.forward import loss_rows, row_logprobs
from megagrpo.policy.logprob_gap import LargestGap
from megagrpo.rollout.rollouts import SampleKey


@dataclass(frozen=True)
class SequenceTerms:
    """What the update needs of each sequence, the same on all ranks: numbers by sample key."""

    advantages: Mapping[SampleKey, float]
    # weight of each token of the sequence in the summed loss: holds the global denominator
    token_weights: Mapping[SampleKey, float]
    # publishes between the weights that sampled the sequence and the actor's
    policy_ages: Mapping[SampleKey, int]
    # scales the KL to go that is subtracted from a token's advantage; 0: all tokens have their sequence's
    # advantage
    kl_scale: float = 0.0


class PolicyLoss:
    """Callable that the pipeline schedule runs on each micro-batch's output.

    Where `_may_take_chunks`, the gradient is formed while the logits are there (three GEMMs, four with the
    exact KL: `linear_token_loss`); otherwise the backward recomputes the logits (four and six GEMMs:
    `linear_logprobs`, `linear_exact_kl`). Either way a micro-batch under tensor parallelism costs one MAX and
    one SUM over its rows.
    """

    def __init__(
        self,
        model: StageModel,
        algorithm: Algorithm,
        temperature: float,
        sequences: SequenceTerms,
        reference: StageModel | None,
        largest_gap: LargestGap | None,
        is_comparable: bool = True,
    ):
        """Build the loss of one update.

        Args:
            largest_gap: told of every row where these are the first log-probs of the step, to be compared
                with the engine's; None where that has been done, or the actor has moved.
            reference: the reference's stage, where the exact KL needs its output weight.
            is_comparable: the engine's log-probs are over the same tokens as the actor's.
        """
        self.model, self.algorithm, self.temperature = model, algorithm, temperature
        self.sequences, self.reference, self.largest_gap = sequences, reference, largest_gap
        self.is_comparable = is_comparable

    def __call__(self, batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Return (sum over the micro-batch's tokens of weight * loss, metrics)."""
        terms = batch.terms
        keep = (
            torch.arange(len(batch.targets), device=batch.targets.device)
            if terms.keep is None
            else terms.keep.nonzero()[:, 0]
        )
        hidden = loss_rows(self.model, output, batch)[keep]
        if self._may_take_chunks(hidden):
            return self._from_chunks(batch, terms, keep, hidden)
        return self._from_logprobs(batch, terms, keep, hidden)

    def _may_take_chunks(self, hidden: torch.Tensor) -> bool:
        """Whether the gradient is formed in the forward, which may hand the rows to the loss chunk by chunk.

        One chunk always may. Several chunks cost a pair of collectives each under tensor parallelism and cut
        sequences apart, so they are for token-local losses on one tensor parallel rank. Under context
        parallelism the sums of a sequence loss are collectives too, which all ranks must reach alike, rows or
        no rows.
        """
        if self.algorithm.needs_whole_sequences and self.model.groups.cp.size() > 1:
            return False
        if self.model.tp == 1 and not self.algorithm.needs_whole_sequences:
            return True
        return fits_one_chunk(hidden, self.model.output_weight, self.algorithm.needs_exact_kl)

    def _from_logprobs(
        self, batch: MicroBatch, terms: RowTerms, keep: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        exact_kl = None
        if self.algorithm.needs_exact_kl:
            scores = linear_exact_kl(
                hidden,
                self.model.output_weight,
                terms.ref_hidden[keep],
                self.reference.output_weight,
                batch.targets[keep],
                vocab_size=self.model.hf.vocab_size,
                temperature=self.temperature,
                group=self.model.groups.tp,
                reduce_hidden_grad=not self.model.config.sequence_parallel,
            )
            exact_kl = scores.kl
        else:
            scores = row_logprobs(
                self.model, hidden, batch.targets[keep], self.temperature, compute_entropy=True
            )
        inputs = replace(
            self._inputs(batch, terms, keep, scores.logprobs, scores.entropy, exact_kl),
            sequence_sum=lambda values: sum_sequences(
                values, batch.sequence_ids[keep], batch.num_sequences, self.model.groups.cp
            ),
        )
        loss, metrics = aggregate_loss(self.algorithm.token_loss(inputs), self._weights(batch, keep))
        return loss, metrics | self._mismatch(batch, keep, scores.logprobs)

    def _from_chunks(
        self, batch: MicroBatch, terms: RowTerms, keep: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        chunks: list[Mapping[str, Metric]] = []
        weights = self._weights(batch, keep)

        def chunk_loss(
            logprobs: torch.Tensor,
            entropy: torch.Tensor | None,
            rows: slice,
            exact_kl: torch.Tensor | None = None,
        ) -> torch.Tensor:
            inputs = self._inputs(batch, terms, keep[rows], logprobs, entropy, exact_kl)
            output = self.algorithm.token_loss(inputs)
            chunks.append(aggregate_loss(output, weights[rows])[1])
            return output.loss * weights[rows].to(output.loss.dtype)

        result = linear_token_loss(
            hidden,
            self.model.output_weight,
            batch.targets[keep],
            chunk_loss,
            vocab_size=self.model.hf.vocab_size,
            temperature=self.temperature,
            group=self.model.groups.tp,
            compute_entropy=True,
            reduce_hidden_grad=not self.model.config.sequence_parallel,
            reference=(terms.ref_hidden[keep], self.reference.output_weight)
            if self.algorithm.needs_exact_kl
            else None,
        )
        return result.loss, merge_metrics(chunks) | self._mismatch(batch, keep, result.logprobs)

    def _inputs(
        self,
        batch: MicroBatch,
        terms: RowTerms,
        rows: torch.Tensor,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        exact_kl: torch.Tensor | None,
    ) -> LossInputs:
        def pick(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[rows]

        return LossInputs(
            actor_logprobs=logprobs,
            old_logprobs=logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs[rows],
            advantages=self._advantages(batch)[rows],
            sequence_ids=batch.sequence_ids[rows],
            num_sequences=batch.num_sequences,
            config=self.algorithm.config,
            ref_logprobs=pick(terms.ref_logprobs),
            rollout_logprobs=batch.rollout_logprobs[rows] if self.is_comparable else None,
            entropy=entropy,
            exact_kl=exact_kl,
            correction_weights=pick(terms.correction_weights),
        )

    def _advantages(self, batch: MicroBatch) -> torch.Tensor:
        """Return the advantage of each row's token [R] float32."""
        if batch.terms.kl_to_go is None:
            return batch.per_row(self.sequences.advantages)
        shared = batch.per_row(self.sequences.advantages, torch.float64)
        return (shared - self.sequences.kl_scale * batch.terms.kl_to_go).float()

    def _weights(self, batch: MicroBatch, keep: torch.Tensor) -> torch.Tensor:
        return batch.per_row(self.sequences.token_weights, torch.float64)[keep]

    def _mismatch(self, batch: MicroBatch, keep: torch.Tensor, logprobs: torch.Tensor) -> dict[str, Metric]:
        """Measure engine against actor here where these log-probs are the actor's first of the step."""
        if self.largest_gap is None:
            return {}
        self.largest_gap.add(batch, keep, logprobs, self.sequences.policy_ages)
        ages = batch.per_row(self.sequences.policy_ages, torch.int64)
        return measure_mismatch(logprobs, batch.rollout_logprobs[keep], batch.positions[keep], ages[keep])
