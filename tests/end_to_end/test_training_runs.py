"""Whole runs: files, first-step identities, the same tokens everywhere, resuming, and every algorithm
option in the loop.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrpo.config.load import dump_config, load_config
from megagrpo.planning.metric_dictionary import find

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]
# relative: metrics of later steps, after float32 differences went through AdamW's first, sign-like updates
NOISE = 2e-3

VARIANTS = {
    "two_by_two": ["update.mini_batches_per_step=2", "update.epochs_per_step=2", "algorithm.preset=null"],
    "engine_old": ["algorithm.old_logprobs=engine", "update.epochs_per_step=2"],
    "kl_loss": ["algorithm.kl.coef=0.1"],
    "kl_exact": ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=exact"],
    "kl_reward": ["algorithm.preset=rloo", "algorithm.kl.coef=0.1"],
    "adaptive_kl": ["algorithm.kl.coef=0.1", "algorithm.kl.adaptive_target=1.0e-6"],
    "corrected": [
        "algorithm.correction.importance=token",
        "algorithm.correction.band_low=0.5",
        "algorithm.correction.band_high=2.0",
    ],
    "rejecting": [
        "algorithm.correction.reject=geometric",
        "algorithm.correction.reject_low=0.9",
        "algorithm.correction.reject_high=1.1",
    ],
    "gspo": [
        "algorithm.preset=gspo",
        "update.epochs_per_step=2",
        "algorithm.clip_low=0.2",
        "algorithm.clip_high=0.2",
    ],
    "entropy": ["algorithm.entropy_coef=0.01"],
    "bf16": ["precision.recipe=bf16", "rollout.logprob_gap.stop_above_mean=null"],
    "dapo": ["algorithm.preset=dapo", "algorithm.kl.coef=0", "algorithm.dynamic_sampling.max_refills=2"],
    "no_signal": [
        "algorithm.preset=dapo",
        f"rewards.functions.0.name={Path(__file__).parent / 'constant_reward.py'}:constant",
    ],
    "narrowed": [
        "rollout.top_p=0.9",
        "rollout.top_k=8",
        "algorithm.correction.importance=sequence",
        "algorithm.correction.reject=product",
        "algorithm.correction.reject_low=0.999",
        "algorithm.correction.reject_high=1.001",
    ],
    "other_rope": ["model.overrides={rope_parameters: {rope_type: default, rope_theta: 5000.0}}"],
    "reinforce_pp": ["algorithm.preset=reinforce_pp", "algorithm.kl.coef=0.1"],
    "gap_warned": ["rollout.logprob_gap.warn_above=1e-12"],
    "unpacked": ["update.packing=false"],
    "recompute": ["update.recompute=full"],
}


@pytest.fixture(scope="module")
def tp2_run(run_all):
    """Six steps as TP2 with a checkpoint every three."""
    return run_all(2, {"tp2": ["run.steps=6", "checkpoint.every=3", "evaluation.every=3"]})["tp2"]


@pytest.fixture(scope="module")
def variants(run_all):
    """Two steps of every variant, as PP2."""
    return run_all(
        2,
        {name: ["run.steps=2", "parallel.tp=1", "parallel.pp=2", *extra] for name, extra in VARIANTS.items()},
    )


def test_a_run_leaves_what_it_promises(tp2_run, rows_of):
    assert [row["step"] for row in rows_of(tp2_run)] == list(range(7))
    config = load_config(tp2_run / "config.yaml", [])
    assert dump_config(config) == (tp2_run / "config.yaml").read_text()
    summary = json.loads((tp2_run / "summary.json").read_text())
    assert summary["steps"] == 6 and len(summary["peak_rss_bytes"]) == 2
    assert {"first", "last", "best"} == set(summary["eval"]["sampled"])
    assert list((tp2_run / "tensorboard").iterdir()) and list((tp2_run / "completions").glob("step_*.jsonl"))


def test_export_loads_in_transformers_and_has_learned(tp2_run):
    tokenizer = AutoTokenizer.from_pretrained(tp2_run / "hf")
    model = AutoModelForCausalLM.from_pretrained(tp2_run / "hf")
    prompt = tokenizer("^9031=", return_tensors="pt").input_ids
    answer = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer).replace(" ", "").startswith("0139")
    summary = json.loads((tp2_run / "summary.json").read_text())
    assert summary["eval"]["sampled"]["last"] > summary["eval"]["sampled"]["first"] + 0.1


def test_first_step_is_exactly_on_policy(tp2_run, rows_of):
    """actor == old policy: ratio 1, nothing clipped, loss 0 (centred advantages), and a gradient all the
    same.
    """
    first = rows_of(tp2_run)[1]
    assert abs(first["loss/total"]) <= 1e-6
    assert first["policy/ratio_max"] == first["policy/ratio_min"] == 1.0
    assert first["policy/clip_fraction"] == 0.0
    assert first["optimizer/grad_norm"] > 0.01
    assert first["rollout/max_logprob_gap"] <= 2e-5


@pytest.fixture(scope="module")
def first_steps(run_all):
    """One step on one rank, on two as PP2, on four as TP2 x PP2."""
    alone = run_all(1, {"alone": ["run.steps=1", "parallel.tp=1"]})
    pp2 = run_all(2, {"pp2": ["run.steps=1", "parallel.tp=1", "parallel.pp=2"]})
    return alone | pp2 | run_all(4, {"tp2pp2": ["run.steps=1", "parallel.tp=2", "parallel.pp=2"]})


def test_samples_are_the_same_for_any_number_of_ranks(tp2_run, first_steps, rows_of):
    """The first step's completions come from the same weights: counter-based draws make them equal on 1, 2
    and 4 ranks.
    """
    for folder in first_steps.values():
        for name in ("reward/mean", "rollout/generated_tokens", "rollout/completion_tokens"):
            assert rows_of(folder)[1][name] == rows_of(tp2_run)[1][name]
        assert rows_of(folder)[0] == rows_of(tp2_run)[0]  # the evaluation before the first step too


def test_engine_and_actor_agree_in_every_layout(tp2_run, first_steps, rows_of):
    """Before any update the actor's log-probs are the engine's on every token, as TP2, PP2 and TP2 x PP2."""
    for folder in (tp2_run, *first_steps.values()):
        assert rows_of(folder)[1]["rollout/max_logprob_gap"] <= 2e-5


def test_resume_in_another_layout_goes_on_within_rounding(tp2_run, run_all, rows_of, tmp_path):
    for name in ("pp2", "vpp2", "cp2", "dp2"):
        shutil.copytree(tp2_run, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_000006")
    layouts = {
        "pp2": ["parallel.pp=2"],
        "vpp2": ["parallel.pp=2", "parallel.vpp=2", "checkpoint.every=4"],
        "cp2": ["parallel.cp=2", "checkpoint.every=4"],
        "dp2": ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
    }
    runs = {name: ["run.steps=4", "parallel.tp=1", *layout] for name, layout in layouts.items()}
    swapped = {"vpp2": "cp2", "cp2": "vpp2"}  # each then goes on from what the other layout has saved
    for name, other in swapped.items():
        runs[f"{name} as {other}"] = [
            f"run.dir={tmp_path / name}",
            "run.steps=5",
            "parallel.tp=1",
            *layouts[other],
        ]
    run_all(2, runs, root=tmp_path)
    for name in swapped:
        assert rows_of(tmp_path / name)[5]["optimizer/grad_norm"] == pytest.approx(
            rows_of(tp2_run)[5]["optimizer/grad_norm"], rel=NOISE
        )
    for name in layouts:
        resumed, whole = rows_of(tmp_path / name)[4], rows_of(tp2_run)[4]
        # the same weights and draws: the same completions
        assert resumed["reward/mean"] == whole["reward/mean"]
        assert resumed["update/trained_tokens"] == whole["update/trained_tokens"]
        assert resumed["optimizer/grad_norm"] == pytest.approx(whole["optimizer/grad_norm"], rel=1e-4)


def test_a_step_without_any_signal_changes_nothing_and_goes_on(variants, rows_of):
    """Every reward is equal, so dynamic sampling drops every group up to its bound, and no update is made."""
    for row in rows_of(variants["no_signal"])[1:]:
        assert (
            row["rollout/dropped_groups"] == 8 * (1 + row["rollout/refills"]) and row["rollout/refills"] == 3
        )
        assert row["update/trained_tokens"] == 0 and "optimizer/grad_norm" not in row


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"no_signal"}))
def test_every_option_runs_and_updates(variants, rows_of, name):
    rows = rows_of(variants[name])
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["optimizer/grad_norm"] > 0 and row["update/skipped_nonfinite"] == 0


def test_options_without_effect_on_the_maths_change_nothing(variants, rows_of):
    """Packing, recompute and a correction that keeps every token give the metrics of the same data path."""
    first = {name: rows_of(variants[name])[1] for name in ("unpacked", "recompute", "corrected", "rejecting")}
    for name, row in first.items():
        assert row["optimizer/grad_norm"] == pytest.approx(
            first["unpacked"]["optimizer/grad_norm"], rel=1e-5
        ), name


def test_an_unchanged_policy_has_gap_0_and_weight_1_where_top_p_and_top_k_narrow(variants, rows_of):
    """Renormalised log-probs of the engine would be 0.1 nats a token above the actor's."""
    for row in rows_of(variants["narrowed"])[1:]:
        assert row["policy/rollout_gap_max"] < 1e-4
        assert row["policy/correction_weight"] == pytest.approx(1.0, abs=1e-3)
        assert row["policy/correction_rejected_fraction"] == 0


def test_engine_actor_and_export_have_the_overridden_fields(variants, rows_of):
    """With the model's own base of 10000 in one of them the gap would be some tenths of a nat."""
    run = variants["other_rope"]
    assert all(row["policy/rollout_gap_max"] < 1e-4 for row in rows_of(run)[1:])
    assert json.loads((run / "hf" / "config.json").read_text())["rope_parameters"]["rope_theta"] == 5000.0
    assert "model.overrides: rope_parameters: {'rope_type'" in (run / "log.txt").read_text()


def test_a_gap_beyond_its_limit_names_the_token_once(variants):
    log = (variants["gap_warned"] / "log.txt").read_text()
    pattern = (
        r"warning: step 1: engine and actor log-probs differ by up to \S+, .*: prompt \d+, completion \d, "
        r"token \d+ \(id \d+\): engine -\S+, actor -\S+, weight version 0; likely causes: "
    )
    assert re.search(pattern, log) and "warning: step 2" not in log, log


def test_refills_are_bounded_and_counted(variants, rows_of):
    for row in rows_of(variants["dapo"])[1:]:
        assert 0 <= row["rollout/refills"] <= 2


def test_exact_and_sampled_kl_start_at_zero(variants, rows_of):
    for name in ("kl_loss", "kl_exact"):
        assert rows_of(variants[name])[1]["policy/ref_kl"] == pytest.approx(0.0, abs=1e-6)
        assert rows_of(variants[name])[2]["policy/ref_kl"] > 0


def test_export_of_the_quickstart_is_float32(tp2_run):
    model = AutoModelForCausalLM.from_pretrained(tp2_run / "hf")
    assert next(model.parameters()).dtype == torch.float32


def test_every_number_of_every_run_is_in_the_dictionary_of_metrics(variants):
    recorded = {
        name
        for folder in variants.values()
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        for name in json.loads(line)
    } - {"step"}
    assert len(recorded) > 60
    assert not [name for name in recorded if find(name) is None]
