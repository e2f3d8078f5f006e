"""The numbers that a step's updates are reported by."""

from megagrpo.algorithms.diagnostics import FRESH_GAP
from megagrpo.policy.update import UpdateResult
from megagrpo.telemetry import names


def compute_update_metrics(result: UpdateResult, lr: float) -> dict[str, float]:
    """Return loss, gradient norm, gaps and counts of one step, the same on all ranks.

    Args:
        lr: learning rate of its last update.
    """
    metrics: dict[str, float] = {"update/trained_tokens": result.trained_tokens}
    metrics[names.SKIPPED_UPDATES] = sum(not applied.is_finite for applied in result.applied)
    if result.applied:
        metrics[names.GRAD_NORM] = result.applied[-1].grad_norm
        metrics["optimizer/lr"] = lr
    if result.logprob_gap:
        metrics[names.LOGPROB_GAP] = result.logprob_gap.gap
    if FRESH_GAP in result.metrics:
        metrics[names.MEAN_LOGPROB_GAP] = result.metrics[FRESH_GAP]
    return metrics | {
        names.LOSS if name == "loss" else f"policy/{name}": value for name, value in result.metrics.items()
    }
