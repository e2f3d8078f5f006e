"""The loss of one micro-batch on the last pipeline stage: log-probs, the algorithm's token loss, the weighted sum."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megagrpo.algorithms.aggregation import aggregate_loss
from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.algorithms.losses import LossInputs
from megagrpo.algorithms.metrics import Metric
from megagrpo.models.build import StageModel
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.forward import loss_rows, row_logprobs_of
from megagrpo.rollout.rollouts import SampleKey


@dataclass(frozen=True)
class SequenceTerms:
    """What the update needs of each sequence, the same on all ranks: numbers by sample key."""

    advantages: Mapping[SampleKey, float]
    token_weights: Mapping[SampleKey, float]  # weight of each token of the sequence in the summed loss: holds the global denominator


@dataclass
class RowTerms:
    """What the last stage knows of a micro-batch's rows before the update. None: not needed, so not computed."""

    old_logprobs: torch.Tensor | None = None  # [R]; None: the actor's own values of this very forward, so the ratio is exactly 1
    ref_logprobs: torch.Tensor | None = None  # [R]
    ref_hidden: torch.Tensor | None = None  # [R, H], for the exact KL
    keep: torch.Tensor | None = None  # bool [R]: rows that a correction leaves in the loss
    correction_weights: torch.Tensor | None = None  # [R]


class PolicyLoss:
    """Callable that the pipeline schedule runs on each micro-batch's output."""

    def __init__(
        self,
        model: StageModel,
        algorithm: Algorithm,
        temperature: float,
        sequences: SequenceTerms,
        rows: Mapping[int, RowTerms],
        reference: StageModel | None,
    ):
        """
        Args:
            rows: by `id` of the micro-batch; a micro-batch without an entry has no terms beyond its own forward.
            reference: the reference's stage, where the exact KL needs its output weight.
        """
        self.model, self.algorithm, self.temperature = model, algorithm, temperature
        self.sequences, self.rows, self.reference = sequences, rows, reference

    def __call__(self, batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Return (sum over the micro-batch's tokens of weight * loss, metrics)."""
        terms = self.rows.get(id(batch), RowTerms())
        hidden = loss_rows(self.model, output, batch)
        scores = row_logprobs_of(self.model, hidden, batch, self.temperature, compute_entropy=True)
        exact_kl = self._exact_kl(hidden, terms) if self.algorithm.needs_exact_kl else None
        old = scores.logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs

        def kept(rows: torch.Tensor | None) -> torch.Tensor | None:
            return rows if rows is None or terms.keep is None else rows[terms.keep]

        loss = self.algorithm.token_loss(
            LossInputs(
                actor_logprobs=kept(scores.logprobs),
                old_logprobs=kept(old),
                advantages=kept(batch.per_row(self.sequences.advantages)),
                sequence_ids=kept(batch.sequence_ids),
                num_sequences=batch.num_sequences,
                config=self.algorithm.config,
                ref_logprobs=kept(terms.ref_logprobs),
                rollout_logprobs=kept(batch.rollout_logprobs),
                entropy=kept(scores.entropy),
                exact_kl=kept(exact_kl),
                correction_weights=kept(terms.correction_weights),
            )
        )
        return aggregate_loss(loss, kept(batch.per_row(self.sequences.token_weights, torch.float64)))

    def _exact_kl(self, hidden: torch.Tensor, terms: RowTerms) -> torch.Tensor:
        from megagrpo.ops.exact_kl import linear_exact_kl

        return linear_exact_kl(
            hidden,
            self.model.output_weight,
            terms.ref_hidden,
            self.reference.output_weight,
            vocab_size=self.model.hf.vocab_size,
            temperature=self.temperature,
            group=self.model.groups.tp,
            reduce_hidden_grad=not self.model.config.sequence_parallel,
        )
