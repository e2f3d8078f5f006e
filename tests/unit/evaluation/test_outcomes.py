"""What is told of a held-out set, from rollouts written by hand."""

import numpy as np
import pytest

from megagrpo.config.rollout_sections import EvaluationSetConfig, RolloutConfig
from megagrpo.errors import UserError
from megagrpo.evaluation.evaluate import EVALUATION_SEED_OFFSET, evaluate_set, sampling_of_set
from megagrpo.evaluation.outcomes import read_outcome
from megagrpo.evaluation.prompt_digests import find_contamination, prompt_digest
from megagrpo.evaluation.results import build_table, describe_results
from megagrpo.rollout.rollouts import CompletionRecord, StepRollouts
from megagrpo.types import Prompt, Reward

# (source, [(score, answer, tokens, finish reason)]) of three prompts
ROWS = [
    ("algebra", [(1.0, "7", 3, "stop"), (0.0, "8", 5, "length")]),
    ("algebra", [(1.0, "2", 4, "stop"), (1.0, "2", 4, "stop")]),
    ("geometry", [(0.0, "", 8, "length"), (0.0, "", 8, "length")]),
]


def build_rollouts(rows=ROWS, outcome="ok"):
    prompts = [
        Prompt(number, f"prompt {number}", (1,), source=source) for number, (source, _) in enumerate(rows)
    ]
    records = {
        (group, place): CompletionRecord(
            (group, place),
            0,
            tokens,
            reason,
            Reward(score, {"math": score}, outcome, answer=answer),
            0,
        )
        for group, (_, completions) in enumerate(rows)
        for place, (score, answer, tokens, reason) in enumerate(completions)
    }
    return StepRollouts(prompts, records, {}, 2)


def test_the_numbers_of_a_set_are_those_counted_by_hand():
    metrics = read_outcome("set", ["pass_at_k", "maj_at_k"], build_rollouts(), {}).metrics()
    means = np.array([0.5, 1.0, 0.0])
    assert metrics == {
        "eval/set": pytest.approx(3 / 6),
        "eval/set/standard_error": pytest.approx(means.std(ddof=1) / 3**0.5),
        "eval/set/pass@2": pytest.approx(2 / 3),
        "eval/set/maj@2": pytest.approx((0.5 + 1 + 0) / 3),
        "eval/set/failed_fraction": 0.0,
        "eval/set/completion_tokens": pytest.approx(32 / 6),
        "eval/set/cut_by_length_fraction": pytest.approx(3 / 6),
        "eval/set/source/algebra": pytest.approx(0.75),
        "eval/set/source/geometry": 0.0,
    }


def test_results_have_intervals_sources_lengths_and_every_prompt():
    outcome = read_outcome("set", ["pass_at_k", "maj_at_k"], build_rollouts(), {"temperature": 1.0})
    results = describe_results([outcome], model="here", step=3)
    told = results["sets"]["set"]
    assert (results["model"], results["step"], told["sampling"]) == ("here", 3, {"temperature": 1.0})
    assert list(told["metrics"]) == ["mean@2", "pass@2", "maj@2"]
    mean = told["metrics"]["mean@2"]
    assert mean["low"] < mean["value"] == 0.5 < mean["high"]
    assert told["sources"]["algebra"]["mean@2"]["value"] == 0.75
    assert told["tokens"] == {"mean": pytest.approx(32 / 6), "median": 4.5, "longest": 8}
    assert told["prompts"][0]["scores"] == (1.0, 0.0) and told["prompts"][0]["cut"] == 1
    assert told["prompts"][0]["digest"] == prompt_digest("prompt 0")
    rows = list(build_table(results).columns[3].cells)
    assert rows.count("mean@2") == 3 and rows.count("maj@2") == 3  # all, algebra, geometry
    assert {"tokens", "cut by length"} <= set(rows)


def test_a_set_samples_by_its_own_values_and_by_the_runs_where_it_has_none():
    rollout = RolloutConfig(max_new_tokens=64, top_p=0.9, top_k=5, stop=("\n",))
    own = EvaluationSetConfig(name="a", source="a", temperature=0.6, top_p=0.95, max_new_tokens=128)
    sampling = sampling_of_set(own, rollout, seed=3)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.6, 0.95, 128)
    assert (sampling.top_k, sampling.stop, sampling.seed) == (5, ("\n",), 3 + EVALUATION_SEED_OFFSET)
    other = sampling_of_set(EvaluationSetConfig(name="b", source="b"), rollout, seed=3)
    assert (other.temperature, other.top_p, other.max_new_tokens) == (1.0, 0.9, 64)
    greedy = sampling_of_set(EvaluationSetConfig(name="c", source="c", temperature=0), rollout, seed=3)
    assert (greedy.top_p, greedy.top_k) == (1.0, 0)


def test_a_set_without_any_score_ends_the_evaluation_and_keeps_nothing():
    class Generator:
        def generate(self, request):
            return build_rollouts(outcome="timeout")

    kept = []
    config = EvaluationSetConfig(name="a", source="a")
    with pytest.raises(UserError, match="scorer outage: evaluation set 'a'"):
        evaluate_set(Generator(), config, [], RolloutConfig(), 0, lambda *told: kept.append(told))
    assert not kept


def test_held_out_prompts_that_are_trained_on_are_found_by_their_text():
    training = [Prompt(0, "What is  1 + 1?\n", (1,)), Prompt(1, "Other", (1,))]
    held_out = [
        Prompt(7, "what is 1 + 1?", (1,)),
        Prompt(8, "What is 1 + 2?", (1,)),
        Prompt(9, "other ", (1,)),
    ]
    assert find_contamination(training, held_out) == [7, 9]
    assert prompt_digest("ﬁve") == prompt_digest("FIVE")  # a ligature is its letters
    assert find_contamination(training, []) == []
