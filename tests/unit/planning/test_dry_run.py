"""A dry run tells what a step will be, with numbers that can be checked by hand, and builds nothing."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.config.differences import differences
from megagrpo.config.load import load_config
from megagrpo.config.yaml_core import parse_yaml
from megagrpo.errors import ConfigError, UserError
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.planning.components import verify_components
from megagrpo.planning.dry_run import (
    compute_batch_arithmetic,
    format_dry_run,
    print_dry_run,
)
from megagrpo.planning.inputs import format_inputs
from megagrpo.planning.memory_table import read_gigabytes
from megagrpo.planning.preflight import prepare_run
from megagrpo.policy.microbatches import PackingRules, SampleSize, plan_microbatches
from megagrpo.train import main, parse_arguments


@pytest.fixture
def run_file(tmp_path, monkeypatch, character_tokenizer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    model = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **model}))
    (tmp_path / "model" / "model.safetensors").touch()
    character_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 32)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: model}\ndata: {source: train.jsonl}\nrewards: {functions: [{name: exact_match}]}\n"
    )
    return path


OVERRIDES = [
    "rollout.prompts_per_step=12",
    "rollout.completions_per_prompt=3",
    "rollout.max_new_tokens=60",
    "data.max_prompt_tokens=40",
    "update.mini_batches_per_step=2",
    "update.epochs_per_step=2",
    "update.max_tokens_per_microbatch=350",
]


def batch_of(config, layout):
    return compute_batch_arithmetic(config.rollout, config.update, config.data.max_prompt_tokens, layout)


def test_batch_arithmetic_by_hand(run_file):
    # 12 / 2 = 6 groups * 3 = 18 sequences per mini-batch. 3 sequences of 100 tokens fit 350: ceil(18 / (4 *
    # 3)) = 2 micro-batches.
    # Shared prompts: 40 + 3 * 60 = 220 tokens a group, 1 group a micro-batch: ceil(6 / 4) = 2.
    batch = batch_of(load_config(run_file, OVERRIDES), ParallelLayout(4))
    assert (batch.completions, batch.max_tokens_per_step, batch.updates_per_step) == (36, 3600, 4)
    assert (batch.groups_per_mini_batch, batch.sequences_per_mini_batch) == (6, 18)
    assert batch.max_microbatches_per_rank == 2


def test_without_packing_each_sequence_is_a_micro_batch(run_file):
    batch = batch_of(load_config(run_file, [*OVERRIDES, "update.packing=false"]), ParallelLayout(4))
    assert batch.max_microbatches_per_rank == 5


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_plan_has_more_micro_batches_than_the_bound(run_file, data):
    draw = data.draw
    groups, completions = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    prompt, new = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    budget = draw(st.integers(prompt + new, 4 * (prompt + new)))
    dp, pp = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2]))
    packing, share = draw(st.booleans()), draw(st.booleans())
    overrides = {
        "rollout.prompts_per_step": groups,
        "rollout.completions_per_prompt": completions,
        "rollout.max_new_tokens": new,
        "data.max_prompt_tokens": prompt,
        "update.max_tokens_per_microbatch": budget,
        "update.packing": str(packing).lower(),
        "update.share_prompts": str(share).lower(),
        "parallel.pp": pp,
    }
    config = load_config(run_file, [f"{name}={value}" for name, value in overrides.items()])
    samples = []
    for group in range(groups):
        prompt_tokens = draw(st.integers(1, prompt))
        samples += [SampleSize(group, prompt_tokens, draw(st.integers(1, new))) for _ in range(completions)]
    layout = ParallelLayout(world_size=dp * pp, pp=pp)
    rules = PackingRules(
        budget, packing=packing, share_prompts=share, min_microbatches=layout.min_microbatches
    )
    plans = plan_microbatches(samples, dp, rules, hidden_size=8)
    assert max(map(len, plans)) <= batch_of(config, layout).max_microbatches_per_rank


def test_the_resolved_configuration_comes_last_where_it_is_asked_for(run_file, capsys):
    config = load_config(run_file, OVERRIDES)
    print_dry_run(config, 1)
    assert "Configuration" not in capsys.readouterr().out
    print_dry_run(config, 1, shows_config=True)
    resolved = capsys.readouterr().out.partition("Configuration\n-------------\n")[2]
    assert parse_yaml(resolved, "dry run")["rollout"]["prompts_per_step"] == 12


def test_what_differs_from_the_defaults_is_named_with_the_default(run_file):
    config = load_config(run_file, ["optimizer.lr=3e-5", "algorithm.preset=dapo", "rollout.top_p=1.0"])
    lines = differences(config)
    assert "optimizer.lr: 3e-05 (default 1e-06)" in lines
    assert "algorithm.clip_high: 0.28 (default 0.2)" in lines  # of the preset
    assert "model.path: model" in lines and "rewards.functions: exact_match" in lines
    assert not [line for line in lines if line.startswith("rollout.top_p")]


def test_values_are_shown_as_they_are_written(run_file):
    overrides = ['rollout.stop=["\\n", "END"]', "data.shuffle=false", "evaluation.every=0", "optimizer.lr=1"]
    lines = differences(load_config(run_file, overrides))
    assert 'rollout.stop: "\\n", END (default none)' in lines
    assert "data.shuffle: false (default true)" in lines
    assert "evaluation.every: 0 (default 10)" in lines
    assert "optimizer.lr: 1.0 (default 1e-06)" in lines


def test_the_memory_of_the_model_is_counted_term_by_term(run_file):
    # 8.19e9 parameters as bf16 on tp 2 x dp 4: 2, 4 and 12 / 4 bytes each for 4.1e9 of them
    hf = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "vocab_size": 151936}
    hf |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "model_type": "qwen3"}
    (run_file.parent / "model" / "config.json").write_text(json.dumps(hf))
    text = format_dry_run(load_config(run_file, ["parallel.tp=2", "precision.recipe=bf16"]), 8)
    assert "about 8.19B, 4.1B on a rank" in text
    assert "weights 7.63 GiB + gradients (float32) 15.26 GiB + optimizer (over dp 4) 11.44 GiB" in text


def test_inputs_are_opened_as_the_run_would(run_file, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000004" / "manifest.json").write_text("{}")
    text = format_inputs(load_config(run_file, ["run.dir=run", "rollout.prompts_per_step=8", "run.steps=6"]))
    assert "last of them: " in text and "an epoch is 32 prompts / 8 a step = 4 steps" in text
    assert "the run draws 6 * 8 = 48 prompts = 1.5 epochs" in text
    assert "data.source: 0 (exact_match 0)" in text
    assert "run: the run goes on from step_000004" in text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("    raise KeyError('gold')", "KeyError"),
        ("    return ['1'] * len(completions)", "'1'"),
        ("    return 1.0", "1.0"),
        ("    return [1.0, 2.0]", "2"),
    ],
)
def test_a_reward_that_the_run_would_stop_at_is_refused(run_file, tmp_path, body, told):
    (tmp_path / "own.py").write_text(f"def score(prompts, completions):\n{body}\n")
    with pytest.raises(UserError, match=r"own\.py:score") as refused:
        format_inputs(load_config(run_file, ["rewards.functions=[{name: 'own.py:score'}]"]))
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_for_gpus_that_are_elsewhere_is_judged_for_them(run_file, monkeypatch):
    monkeypatch.setattr("megagrpo.device.environment.set_thread_environment", lambda ranks: None)
    overrides = ["precision.recipe=fp8_delayed", "engine.name=sglang", "engine.server.replicas=4"]
    with pytest.raises(ConfigError, match="an NVIDIA GPU"):
        prepare_run(run_file, overrides, 8)
    config, ranks = prepare_run(run_file, [*overrides[:1], "parallel.tp=2"], 8, is_elsewhere=True)
    assert (config.precision.recipe, ranks) == ("fp8_delayed", 8)


def test_the_text_holds_the_grid_and_the_arithmetic(run_file):
    config = load_config(run_file, [*OVERRIDES, "parallel.tp=2"])
    text = format_dry_run(config, 4)
    assert "Ranks: 4 = tp 2, dp 2" in text
    assert "replica 0: 0 1\nreplica 1: 2 3" in text
    for line in (
        "completions              12 groups * 3 = 36",
        "tokens of the step       at most 36 * 100 = 3600",
        "optimizer updates        2 mini-batches * 2 epochs = 4",
        "sequences per replica    18 / dp 2 = 9 per mini-batch on average",
        "micro-batches per rank   at most 3 per mini-batch, as many on every rank",
    ):
        assert line in text


def test_dry_run_builds_no_model_and_no_process_group(run_file):
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "megagrpo.train",
            str(run_file),
            "--dry-run",
            "parallel.pp=2",
        ],
        env={**os.environ, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "replica 0: 0 | 1" in done.stdout
    assert 'first of 32 prompts: "1" (1 tokens)' in done.stdout
    imported = {
        line.rsplit("|", 1)[-1].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "yaml" in imported
    assert not {"megatron", "megatron.core", "megagrpo.trainer", "megagrpo.run"} & imported


def test_a_dry_run_finds_a_row_that_the_run_would_stop_at(run_file):
    with pytest.raises(UserError, match=r"train\.jsonl, row 0: 1 prompt tokens \+ 2000 .* context is 1024"):
        format_inputs(load_config(run_file, ["rollout.max_new_tokens=2000"]))


def test_a_loss_without_a_ratio_does_not_correct_for_older_weights(run_file):
    overrides = ["rollout.off_policy=one_step_off", "algorithm.old_logprobs=engine"]
    verify_components(load_config(run_file, overrides))  # ppo_clip has one
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.loss: policy_gradient: has no ratio, so nothing "
        r"corrects",
    ):
        verify_components(load_config(run_file, [*overrides, "algorithm.loss=policy_gradient"]))


def test_misspelt_components_are_told_together(run_file):
    overrides = [
        "algorithm.loss=ppo_clp",
        "algorithm.advantage_options={k: 2}",
        "rewards.functions=[{name: exat_match}, {name: exact_match, options: {colum: answer}}, {name: "
        "'reward.py:score'}]",
    ]
    with pytest.raises(ConfigError) as caught:
        verify_components(load_config(run_file, overrides))
    starts = [
        "algorithm.advantage_options.k: not an option of grpo",
        "algorithm.loss: no loss is called 'ppo_clp'; did you mean ppo_clip?; there are ",
        "rewards.functions.0.name: no reward is called 'exat_match'; did you mean exact_match?; there are ",
        "rewards.functions.1.options.colum: not an option of exact_match; did you mean column?; its "
        "options: column, ",
    ]
    assert len(caught.value.problems) == len(starts)
    for line, start in zip(caught.value.problems, starts, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_tells_a_mistake_at_once_and_others_only_if_they_are_still_there_later(
    run_file, monkeypatch, capsys, rank
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert main([str(run_file), "parallel.tp=2", "rollout.temprature=1"]) == 2
    line = "rollout.temprature: not a field; did you mean temperature?\n"
    assert capsys.readouterr() == ("", line if rank == "0" else f"rank 1: {line}")
    assert waited == ([] if rank == "0" else [5.0])


def test_an_override_written_as_an_option_is_told_under_torchrun_too(run_file, capsys):
    assert main([str(run_file), "--dry-run", "--optimizer.lr=1e-6", "-run.steps=2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--optimizer.lr=1e-6: write optimizer.lr=1e-6, without dashes",
        "-run.steps=2: write run.steps=2, without dashes",
    ]


def test_options_and_overrides_may_come_in_any_order():
    options = parse_arguments(["--dry-run", "run.yaml", "a.b=1", "--world-size", "4", "c.d=-2"])
    assert (options.config, options.overrides, options.dry_run, options.world_size) == (
        "run.yaml",
        ["a.b=1", "c.d=-2"],
        True,
        4,
    )


@pytest.mark.parametrize(
    "arguments", [["run.yaml", "--world-size", "2"], ["run.yaml", "--dry-run", "--world-size", "0"], []]
)
def test_a_malformed_command_line_is_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        parse_arguments(arguments)
    assert left.value.code == 2
    assert "usage: python -m megagrpo.train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("80", 80e9), ("80GB", 80e9), ("141 gb", 141e9), ("79.6GiB", 79.6 * 2**30)]
)
def test_the_size_of_a_gpu_is_read_as_it_is_written(text, size):
    assert read_gigabytes(text) == size


@pytest.mark.parametrize("text", ["0", "eighty", "80TB", "-1", ""])
def test_what_is_no_size_of_a_gpu_is_refused(text):
    with pytest.raises(UserError, match="a size in GB is wanted, as 80 or 80GB"):
        read_gigabytes(text)
