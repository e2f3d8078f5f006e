"""maj@k against votes counted by hand, ties and missing answers among them."""

import pytest

from megagrpo.evaluation.score_metrics import compute_majority, measure_maj_at_k, measure_scores


@pytest.mark.parametrize(
    ("answers", "right", "wanted"),
    [
        (["7", "7", "8"], "7", 1.0),
        (["7", "8", "8"], "7", 0.0),
        (["7", "8"], "7", 1 / 2),  # a tie of two, by lot
        (["7", "8", "9"], "7", 1 / 3),
        (["7", "7", "8", "8", "9"], "8", 1 / 2),  # the third does not lead
        (["", "", "7"], "7", 1.0),  # no answer is no vote
        (["", ""], "7", 0.0),
        ([None, "7"], "7", 1.0),
    ],
)
def test_the_answer_with_most_votes_decides_and_a_tie_is_broken_by_lot(answers, right, wanted):
    values = [float(answer == right) for answer in answers]
    assert compute_majority(values, answers) == pytest.approx(wanted, abs=1e-15)


def test_maj_at_k_is_the_mean_over_disjoint_groups_of_k_samples_and_over_prompts():
    # first prompt: (7 7) right, (7 8) tie; second: (8 8) wrong, (7 7) right; four samples: 7 wins, then a tie
    answers = [["7", "7", "7", "8"], ["8", "8", "7", "7"]]
    scores = [[float(answer == "7") for answer in each] for each in answers]
    assert measure_maj_at_k(scores, answers) == {
        "maj@2": pytest.approx((3 / 4 + 1 / 2) / 2),
        "maj@4": pytest.approx((1 + 1 / 2) / 2),
    }


def test_maj_at_k_is_not_told_where_the_reward_tells_no_answers_and_is_0_where_none_was_found():
    scores = [[0.0, 0.0]]
    assert measure_scores(["maj_at_k"], scores, [[None, None]]) == {}
    assert measure_scores(["maj_at_k"], scores, [["", ""]]) == {"maj@2": 0.0}


def test_a_metric_of_the_users_with_a_parameter_answers_is_given_them(tmp_path):
    path = tmp_path / "metric_of_answers.py"
    path.write_text(
        "def unanswered(scores, answers=()):\n"
        "    return {'unanswered': sum(each.count('') for each in answers)}\n"
    )
    assert measure_scores([f"{path}:unanswered"], [[0.0, 1.0]], [["", "7"]]) == {"unanswered": 1.0}
