"""One step off: deterministic, resumed with its rollouts in flight, and the same for any number of ranks."""

import json
import shutil

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]

COMMON = ["run.steps=6", "checkpoint.every=3", "evaluation.every=0", "run.export_hf=false"]
ONE_STEP_OFF = [*COMMON, "rollout.off_policy=one_step_off", "algorithm.correction.importance=token"]


@pytest.fixture(scope="module")
def runs(run_all):
    """Six steps as TP2: one step off twice, with the engine's log-probs as the old ones, and synchronous."""
    engine_old = [*COMMON, "rollout.off_policy=one_step_off", "algorithm.old_logprobs=engine"]
    refilled = [*ONE_STEP_OFF, "algorithm.dynamic_sampling.enabled=true"]
    return run_all(
        2,
        {
            "off": ONE_STEP_OFF,
            "again": ONE_STEP_OFF,
            "engine_old": engine_old,
            "refilled": refilled,
            "synchronous": COMMON,
        },
    )


def test_completions_are_one_publish_old_from_the_second_step_on(runs, rows_of):
    for name in ("off", "engine_old"):
        rows = rows_of(runs[name])[1:]
        assert [row["rollout/weight_version"] for row in rows] == [0, 0, 1, 2, 3, 4]
        assert [row["rollout/policy_age_max"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert all(row["rollout/policy_age_max"] == 0 for row in rows_of(runs["synchronous"])[1:])


def test_only_the_first_step_equals_the_synchronous_run(runs, rows_of):
    """The same prompts and draws: step 1 samples from the same weights, step 2 from those before the
    update.
    """
    off, synchronous = rows_of(runs["off"]), rows_of(runs["synchronous"])
    assert off[1]["reward/mean"] == synchronous[1]["reward/mean"]
    assert off[1]["optimizer/grad_norm"] == pytest.approx(synchronous[1]["optimizer/grad_norm"], rel=1e-4)
    assert off[2]["policy/rollout_logprob"] != synchronous[2]["policy/rollout_logprob"]


def test_old_weights_are_corrected_for(runs, rows_of):
    """By importance weights: old log-probs are the actor's before its update, so the ratio is 1 and the
    weights are not. By the ratio: old log-probs are the engine's."""
    for row in rows_of(runs["off"])[2:]:
        assert row["policy/ratio_max"] == row["policy/ratio_min"] == 1.0
        assert row["policy/correction_weight_max"] > 1.0 and row["policy/effective_sample_fraction"] < 1.0
    for row in rows_of(runs["engine_old"])[2:]:
        assert row["policy/ratio_max"] > 1.0 > row["policy/ratio_min"]


def test_the_same_run_twice_is_bit_equal(runs, rows_of):
    assert rows_of(runs["again"]) == rows_of(runs["off"])


@pytest.mark.parametrize("name", ["off", "refilled"])
def test_resume_with_rollouts_in_flight_is_bit_equal(runs, run_all, rows_of, tmp_path, name):
    shutil.copytree(runs[name], tmp_path / name)
    shutil.rmtree(tmp_path / name / "checkpoints" / "step_000006")
    overrides = ONE_STEP_OFF if name == "off" else [*ONE_STEP_OFF, "algorithm.dynamic_sampling.enabled=true"]
    run_all(2, {name: overrides}, root=tmp_path)
    assert rows_of(tmp_path / name) == rows_of(runs[name])


def test_rollouts_in_flight_are_taken_up_by_another_number_of_ranks(runs, run_all, rows_of, tmp_path):
    """Two files of completions, one rank: the step trains on the same tokens, so the gradient is equal
    within rounding.
    """
    shutil.copytree(runs["off"], tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "checkpoints" / "step_000006")
    state = json.loads(
        (tmp_path / "alone" / "checkpoints" / "step_000003" / "trainer_state.json").read_text()
    )
    # steps 1 to 3, and 4 in flight
    rollout = state["parts"]["rollout"]
    assert (rollout["prompt_position"], rollout["next_step"]) == (8 * 3, 4)
    assert (rollout["in_flight"]["prompts_drawn"], rollout["in_flight"]["num_files"]) == (8 * 4, 2)
    run_all(1, {"alone": [*ONE_STEP_OFF, "run.steps=4", "parallel.tp=1"]}, root=tmp_path)
    resumed, whole = rows_of(tmp_path / "alone")[4], rows_of(runs["off"])[4]
    for name in (
        "reward/mean",
        "rollout/generated_tokens",
        "rollout/weight_version",
        "policy/rollout_logprob",
    ):
        assert resumed[name] == pytest.approx(whole[name], rel=1e-12), name
    assert resumed["optimizer/grad_norm"] == pytest.approx(whole["optimizer/grad_norm"], rel=1e-4)
