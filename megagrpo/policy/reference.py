"""The frozen model that a KL penalty pulls towards. It is built only where a penalty needs it."""

from collections.abc import Sequence

import torch

from megagrpo.models.stage import StageModel
from megagrpo.policy.batch import MicroBatch
from megagrpo.policy.forward import compute_logprobs, loss_rows, run_schedule
from megagrpo.telemetry.activity import Counts, count_nothing


class Reference:
    """A StageModel without gradients or optimizer state."""

    def __init__(self, model: StageModel, counts: Counts = count_nothing):
        self.model, self.counts = model, counts
        for chunk in model.chunks:
            chunk.requires_grad_(False)
            chunk.eval()

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[torch.Tensor]:
        """Return log-probs [R] per micro-batch; empty on stages other than the last."""
        return compute_logprobs(self.model, self.model.chunks, batches, temperature, self.counts)

    def hidden_rows(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the hidden states [R, H] that the exact KL multiplies by the output weight; empty on
        stages other than the last.
        """
        rows = lambda batch, output: loss_rows(self.model, output, batch)  # noqa: E731
        return run_schedule(
            self.model, self.model.chunks, batches, rows, forward_only=True, counts=self.counts
        )
