"""pass@k against its definition, by enumerating every choice of k samples."""

from itertools import combinations
from statistics import mean

import pytest

from megagrpo.errors import UserError
from megagrpo.evaluation.outcomes import standard_error
from megagrpo.evaluation.score_metrics import (
    EVALUATION_METRICS,
    compute_pass_at_k,
    measure_pass_at_k,
    measure_scores,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_right_sample(samples):
    for correct in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations([1] * correct + [0] * (samples - correct), k))
            assert compute_pass_at_k(correct, samples, k) == pytest.approx(
                mean(max(subset) for subset in subsets), abs=1e-15
            )


def test_pass_at_k_stays_exact_for_many_samples():
    # C(9999, 100) / C(10000, 100) = 9900 / 10000: the chance that the one right sample is not among 100 of
    # 10,000
    assert compute_pass_at_k(correct=1, samples=10_000, k=100) == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize(("correct", "samples", "k"), [(-1, 4, 1), (5, 4, 1), (1, 4, 0), (1, 4, 5)])
def test_pass_at_k_refuses_numbers_outside_their_range(correct, samples, k):
    with pytest.raises(ValueError, match="is allowed"):
        compute_pass_at_k(correct, samples, k)


def test_pass_at_k_of_a_set_is_the_mean_over_its_prompts():
    # one of two right; none; all: pass@2 by hand 1, 0, 1
    assert measure_pass_at_k([[1.0, 0.0], [0.0, 0.9], [1.0, 1.0]]) == {"pass@2": pytest.approx(2 / 3)}
    assert list(measure_pass_at_k([[1.0] * 5, [0.0] * 9])) == ["pass@2", "pass@4"]
    assert measure_pass_at_k([[1.0], [0.0]]) == {}


def test_a_metric_of_the_users_is_found_and_its_signature_is_checked(tmp_path):
    path = tmp_path / "own_metric.py"
    path.write_text(
        "def spread(scores):\n    return {'spread': max(map(max, scores))}\n"
        "def two(a, b): ...\n"
        "def bare(scores):\n    return 3\n"
    )
    assert EVALUATION_METRICS.find(f"{path}:spread")([[1.0, 2.0]]) == {"spread": 2.0}
    with pytest.raises(UserError, match=r"own_metric.py:two: is no evaluation metric: .*missing .*'b'"):
        EVALUATION_METRICS.find(f"{path}:two")
    with pytest.raises(UserError, match=r"own_metric.py:bare: must return numbers by name: AttributeError"):
        measure_scores([f"{path}:bare"], [[1.0]])


def test_the_standard_error_of_a_coins_mean_is_that_of_the_textbook():
    # 3 of 8 right: s^2 = n p (1 - p) / (n - 1), standard error s / sqrt(n)
    values = [1.0] * 3 + [0.0] * 5
    assert standard_error(values) == pytest.approx((8 * (3 / 8) * (5 / 8) / 7 / 8) ** 0.5)
    assert standard_error([1.0]) == 0.0
