"""Intervals and paired tests against enumeration and textbook formulas."""

from itertools import product

import numpy as np
import pytest

from megagrpo.errors import UserError
from megagrpo.evaluation.comparison import (
    EXACT_PAIRS,
    build_comparison_table,
    compare_results,
    permutation_test,
    sign_test,
)
from megagrpo.evaluation.intervals import bootstrap_interval
from megagrpo.evaluation.results import read_results
from megagrpo.telemetry.evaluation_files import evaluation_file, write_evaluation


def test_the_interval_of_a_coins_mean_is_the_normal_one_for_many_prompts():
    """2,000 draws place a quantile within about 0.1 standard errors."""
    values = [1.0] * 240 + [0.0] * 560
    error = (0.3 * 0.7 / 800) ** 0.5
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(0.3 - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(0.3 + 1.96 * error, abs=0.15 * error)


def test_the_interval_is_a_point_where_all_prompts_are_alike_and_needs_one():
    assert bootstrap_interval([0.25] * 7) == (0.25, 0.25)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval([])


def test_the_permutation_test_counts_all_ways_to_flip_the_signs():
    differences = [0.5, -0.25, 0.75, 0.25, 0.0, 0.5]
    sums = [
        abs(sum(sign * each for sign, each in zip(signs, differences, strict=True)))
        for signs in product([1, -1], repeat=len(differences))
    ]
    wanted = np.mean([total >= sum(differences) - 1e-12 for total in sums])
    assert permutation_test(differences) == pytest.approx(wanted, abs=1e-12)
    assert permutation_test([0.0, 0.0]) == 1.0


def test_the_drawn_permutation_test_agrees_with_the_sign_test_where_all_differences_are_alike():
    """Equal differences: the sum depends on the number of signs alone, so both tests are the same."""
    better, worse = 27, 13
    assert better + worse > EXACT_PAIRS
    drawn = permutation_test([1.0] * better + [-1.0] * worse)
    assert drawn == pytest.approx(sign_test(better, worse), abs=4 * (0.04 * 0.96 / 20_000) ** 0.5)


def test_the_sign_test_is_the_binomial_tail_of_the_textbook():
    # 8 of 10: 2 * (45 + 10 + 1) / 1024
    assert sign_test(8, 2) == sign_test(2, 8) == pytest.approx(112 / 1024)
    assert sign_test(0, 0) == 1.0 and sign_test(3, 3) == 1.0


def results(*scores, name="set", digests=None):
    prompts = [
        {"digest": digest, "scores": list(each)}
        for digest, each in zip(digests or map(str, range(len(scores))), scores, strict=True)
    ]
    return {"format": 1, "sets": {name: {"prompts": prompts}}}


def test_two_evaluations_are_compared_on_the_prompts_that_both_have():
    first = results((1, 0), (0, 0), (1, 1), digests=["a", "b", "c"])
    second = results((1, 1), (1, 1), (0, 0), digests=["b", "a", "d"])
    (compared,) = compare_results(first, second)
    assert (compared.pairs, compared.unpaired, compared.better, compared.worse) == (2, 2, 2, 0)
    assert (compared.first, compared.second) == (0.25, 1.0)
    assert compared.sign_p_value == 0.5 and compared.p_value == 0.5
    assert "+0.750" in "".join(build_comparison_table([compared], ("A", "B")).columns[4].cells)


def test_prompts_that_come_twice_are_paired_in_their_order():
    twice = results((1,), (0,), digests=["a", "a"])
    (compared,) = compare_results(twice, twice)
    assert (compared.pairs, compared.better, compared.worse, compared.p_value) == (2, 0, 0, 1.0)


def test_evaluations_that_share_nothing_are_refused():
    with pytest.raises(UserError, match="no set is in both: set and other"):
        compare_results(results((1,)), results((1,), name="other"))
    with pytest.raises(UserError, match="set 'set': no prompt is in both"):
        compare_results(results((1,), digests=["a"]), results((1,), digests=["b"]))


def test_a_run_folder_stands_for_its_newest_evaluation_and_other_files_are_refused(tmp_path):
    for step in (0, 10):
        write_evaluation(evaluation_file(tmp_path, step), {"format": 1, "step": step, "sets": {}})
    assert read_results(tmp_path)["step"] == 10
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, problem in [
        ("other.json", "no results of an evaluation"),
        ("broken.json", "no results of an evaluation: Expecting"),
        ("missing.json", "No such file"),
        ("empty", "has no evaluations"),
    ]:
        with pytest.raises(UserError, match=problem):
            read_results(tmp_path / name)
