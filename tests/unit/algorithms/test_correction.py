"""Rollout correction against plain loops, its masks, and the refusal of broken log-probs."""

import math

import pytest
import torch

from megagrpo.algorithms.algorithm_checks import check_logprobs
from megagrpo.algorithms.correction import compute_correction
from megagrpo.algorithms.metrics import finalize_metrics
from megagrpo.config.algorithm_section import AlgorithmConfig, CorrectionConfig
from megagrpo.errors import UserError

LENGTHS = [3, 1, 4]
IDS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
LOG_RATIOS = [0.1, -0.2, 1.5, 0.9, -3.0, 0.0, 0.4, 0.3]
ROLLOUT = torch.tensor([-5.0, -4.0, -6.0, -3.0, -2.0, -1.0, -7.0, -4.5]).double()
OLD = ROLLOUT + torch.tensor(LOG_RATIOS).double()


def correct(old=OLD, rollout=ROLLOUT, **config):
    options = {key: config.pop(key) for key in ("sequence_sum", "positions", "policy_age") if key in config}
    return compute_correction(old, rollout, IDS, 3, CorrectionConfig(**config), **options)


def by_sequence():
    return [LOG_RATIOS[0:3], LOG_RATIOS[3:4], LOG_RATIOS[4:8]]


def test_nothing_configured_changes_nothing_and_still_reports():
    result = correct()
    assert result.weights.eq(1).all() and result.keep.all() and not result.rejected.any()
    assert finalize_metrics(result.diagnostics)["rollout_gap_max"] == pytest.approx(3.0)


def test_token_weights_are_truncated_ratios():
    expected = [min(math.exp(u), 2.0) for u in LOG_RATIOS]
    assert correct(importance="token", importance_cap=2.0).weights.tolist() == pytest.approx(expected)


def test_sequence_weights_are_truncated_products():
    expected = [min(math.exp(sum(row)), 2.0) for row in by_sequence() for _ in row]
    assert correct(importance="sequence", importance_cap=2.0).weights.tolist() == pytest.approx(expected)


def test_band_masks_tokens_on_both_sides_and_keeps_the_weight_inside():
    result = correct(importance="token", importance_cap=5.0, band_low=0.5, band_high=2.0)
    ratios = [math.exp(u) for u in LOG_RATIOS]
    assert result.keep.tolist() == [0.5 <= r <= 2.0 for r in ratios]
    assert result.weights[result.keep].tolist() == pytest.approx([r for r in ratios if 0.5 <= r <= 2.0])
    assert not result.rejected.any()


def test_geometric_rejection_judges_the_mean_log_ratio():
    result = correct(reject="geometric", reject_low=0.9, reject_high=2.0)
    expected = [not 0.9 <= math.exp(sum(row) / len(row)) <= 2.0 for row in by_sequence()]
    assert result.rejected.tolist() == expected == [False, True, True]
    assert result.keep.tolist() == [not expected[i] for i in IDS.tolist()]


def test_product_rejection_judges_the_sum_of_log_ratios():
    result = correct(reject="product", reject_low=0.2, reject_high=3.0)
    assert (
        result.rejected.tolist()
        == [not 0.2 <= math.exp(sum(row)) <= 3.0 for row in by_sequence()]
        == [True, False, True]
    )


def test_geometric_and_product_differ_on_long_sequences():
    assert correct(reject="geometric", reject_high=2.0).rejected.tolist() == [False, True, False]
    assert correct(reject="product", reject_high=2.0).rejected.tolist() == [True, True, False]


def test_one_tiny_token_ratio_vetoes_its_sequence():
    assert correct(veto_below=0.06).rejected.tolist() == [False, False, True]  # exp(-3) = 0.0498
    assert correct(veto_below=0.04).rejected.tolist() == [False, False, False]


def test_product_that_overflows_every_float_is_still_judged_and_capped():
    rollout = torch.full((8,), -900.0).double()
    result = correct(
        old=torch.zeros(8).double(), rollout=rollout, importance="sequence", reject="product", reject_high=1e6
    )
    assert result.rejected.all() and result.weights.tolist() == pytest.approx([2.0] * 8)


def test_weights_carry_no_gradient():
    result = correct(old=OLD.clone().requires_grad_(), importance="token")
    assert not result.weights.requires_grad


def test_sequence_statistics_use_the_given_sum():
    """Under context parallelism the sums come from all ranks; here a rank holds the first half of the
    tokens.
    """
    full = correct(importance="sequence", importance_cap=100.0, reject="geometric", reject_high=1.5)
    half, recorded = torch.arange(8) < 5, []

    def record(values):
        recorded.append(values.new_zeros(3).index_add(0, IDS, values))
        return recorded[-1]

    correct(
        importance="sequence", importance_cap=100.0, reject="geometric", reject_high=1.5, sequence_sum=record
    )
    replies = iter(recorded)
    config = CorrectionConfig(
        importance="sequence", importance_cap=100.0, reject="geometric", reject_high=1.5
    )
    mine = compute_correction(
        OLD[half], ROLLOUT[half], IDS[half], 3, config, sequence_sum=lambda values: next(replies)
    )
    assert torch.equal(mine.rejected, full.rejected)
    assert torch.equal(mine.keep, full.keep[half]) and torch.allclose(mine.weights, full.weights[half])


def test_diagnostics_equal_their_definitions():
    positions = torch.tensor([0, 63, 64, 0, 255, 256, 1024, 70000])
    age = torch.tensor([0, 0, 1, 2, 3, 9, 0, 1])
    result = correct(
        importance="token", importance_cap=2.0, band_high=2.0, positions=positions, policy_age=age
    )
    got = finalize_metrics(result.diagnostics)
    gaps = [abs(u) for u in LOG_RATIOS]
    assert got["rollout_gap"] == pytest.approx(sum(gaps) / 8)
    assert got["rollout_k3"] == pytest.approx(sum(math.exp(u) - u - 1 for u in LOG_RATIOS) / 8)
    assert got["rollout_perplexity"] == pytest.approx(math.exp(-ROLLOUT.mean().item()))
    assert got["old_perplexity"] == pytest.approx(math.exp(-OLD.mean().item()))
    kept = [min(math.exp(u), 2.0) for u in LOG_RATIOS if math.exp(u) <= 2.0]
    assert got["effective_sample_fraction"] == pytest.approx(
        sum(kept) ** 2 / (len(kept) * sum(w * w for w in kept))
    )
    assert got["correction_masked_fraction"] == pytest.approx(2 / 8)
    assert got["rollout_gap/position_0"] == pytest.approx((gaps[0] + gaps[1] + gaps[3]) / 3)
    assert got["rollout_gap/position_64"] == pytest.approx((gaps[2] + gaps[4]) / 2)
    assert got["rollout_gap/position_16384"] == pytest.approx(gaps[7])
    assert "rollout_gap/position_4096" not in got and "rollout_gap/position_4096" in result.diagnostics
    assert got["rollout_gap/age_3"] == pytest.approx((gaps[4] + gaps[5]) / 2)


@pytest.mark.parametrize(
    ("name", "token", "value"),
    [("old_logprobs", 4, math.nan), ("rollout_logprobs", 3, 0.5), ("old_logprobs", 0, -math.inf)],
)
def test_broken_logprob_is_refused_with_token_and_sequence(name, token, value):
    spoiled = {"old_logprobs": OLD.clone(), "rollout_logprobs": ROLLOUT.clone()}
    spoiled[name][token] = value
    with pytest.raises(UserError, match=rf"{name}\[{token}\] \(sequence {int(IDS[token])}\): {value:g}"):
        compute_correction(**spoiled, sequence_ids=IDS, num_sequences=3, config=CorrectionConfig())


def test_logprobs_of_the_wrong_length_are_refused():
    with pytest.raises(UserError, match=r"rollout_logprobs: shape \[7\] for 8 tokens"):
        correct(rollout=ROLLOUT[:7])


def test_rounding_above_zero_is_accepted():
    check_logprobs("rollout_logprobs", torch.tensor([1e-6, -1.0]))


@pytest.mark.parametrize(
    "values",
    [
        {"band_low": 2.0, "band_high": 1.0},
        {"reject": "product"},
        {"reject_high": 2.0},
        {"reject": "geometric", "reject_low": 3.0, "reject_high": 2.0},
    ],
)
def test_contradictory_settings_are_refused(values):
    with pytest.raises(ValueError):
        CorrectionConfig(**values)


def test_bypass_with_a_correction_is_refused():
    with pytest.raises(ValueError, match="old_logprobs: actor"):
        AlgorithmConfig(old_logprobs="engine", correction={"importance": "token"})
