"""What a step's updates are reported by."""

from megagrpo.policy.actor import AppliedUpdate
from megagrpo.policy.update import UpdateResult
from megagrpo.policy.update_metrics import compute_update_metrics


def test_gradient_norms_of_several_updates_are_reported_by_mean_and_largest():
    applied = [AppliedUpdate(norm, applied=True) for norm in (1.0, 5.0, 3.0)]
    metrics = compute_update_metrics(UpdateResult({"loss": 2.0, "loss_max": 3.0}, applied), 1e-3)
    assert metrics["optimizer/grad_norm"] == 3.0 and metrics["optimizer/grad_norm_max"] == 5.0
    assert metrics["loss/total"] == 2.0 and metrics["loss/total_max"] == 3.0
    single = compute_update_metrics(UpdateResult({}, applied[:1]), 1e-3)
    assert single["optimizer/grad_norm"] == 1.0 and "optimizer/grad_norm_max" not in single


def test_the_share_of_padding_is_reported_where_something_was_trained():
    applied = [AppliedUpdate(1.0, applied=True)]
    metrics = compute_update_metrics(UpdateResult({}, applied, padding_fraction=0.25), 1e-3)
    assert metrics["update/padding_fraction"] == 0.25
    assert "update/padding_fraction" not in compute_update_metrics(UpdateResult({}), 1e-3)
