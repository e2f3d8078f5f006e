"""The numbers that a step's updates are reported by."""

from megagrpo.algorithms.diagnostics import FRESH_GAP
from megagrpo.policy.update import UpdateResult
from megagrpo.telemetry import names


def compute_update_metrics(result: UpdateResult, lr: float) -> dict[str, float]:
    """Return losses, gradient norms, gaps and counts of one step, the same on all ranks: of several updates
    the mean and the largest.

    Args:
        lr: learning rate of its last update.
    """
    metrics: dict[str, float] = {"update/trained_tokens": result.trained_tokens}
    metrics[names.SKIPPED_UPDATES] = sum(not applied.is_finite for applied in result.applied)
    if result.applied:
        metrics[names.PADDING_FRACTION] = result.padding_fraction
        norms = [update.grad_norm for update in result.applied]
        metrics[names.GRAD_NORM] = sum(norms) / len(norms)
        if len(norms) > 1:
            metrics[names.LARGEST_GRAD_NORM] = max(norms)
        metrics[names.LEARNING_RATE] = lr
    if result.logprob_gap:
        metrics[names.LOGPROB_GAP] = result.logprob_gap.gap
    if FRESH_GAP in result.metrics:
        metrics[names.MEAN_LOGPROB_GAP] = result.metrics[FRESH_GAP]
    renamed = {"loss": names.LOSS, "loss_max": names.LARGEST_LOSS}
    return metrics | {renamed.get(name, f"policy/{name}"): value for name, value in result.metrics.items()}
