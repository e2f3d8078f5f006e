"""pass@k, maj@k and mean@k against their definitions, by enumerating every choice of k samples."""

from itertools import combinations
from statistics import mean

import pytest

from megagrpo.evaluation.pass_at_k import compute_maj_at_k, compute_mean_at_k, compute_pass_at_k


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


def test_majority_is_right_where_the_most_frequent_answer_is():
    assert compute_maj_at_k(["7", "8", "7"], [True, False, True], k=3) == 1.0
    assert compute_maj_at_k(["7", "8", "8"], [True, False, False], k=3) == 0.0


def test_majority_counts_the_first_k_answers_only():
    assert compute_maj_at_k(["7", "8", "8"], [True, False, False], k=1) == 1.0


def test_tied_majority_is_the_share_of_right_answers_among_the_tied():
    assert compute_maj_at_k(["7", "8", "9"], [True, False, False], k=3) == pytest.approx(1 / 3)


def test_missing_answers_have_no_vote():
    assert compute_maj_at_k([None, None, "7"], [False, False, True], k=3) == 1.0
    assert compute_maj_at_k([None, None], [False, False], k=2) == 0.0


def test_majority_refuses_contradicting_judgements_and_unequal_lengths():
    with pytest.raises(ValueError, match="right and wrong"):
        compute_maj_at_k(["7", "7"], [True, False], k=2)
    with pytest.raises(ValueError, match="2 answers but 1"):
        compute_maj_at_k(["7", "7"], [True], k=1)


def test_mean_at_k_is_the_mean_of_the_first_k_scores():
    assert compute_mean_at_k([1.0, 0.0, 0.5], k=2) == 0.5
    with pytest.raises(ValueError, match="k is 4"):
        compute_mean_at_k([1.0, 0.0, 0.5], k=4)
