"""Mistakes between the sections are told all at once, each with its arithmetic, before a model is built."""

import subprocess
import sys

import pytest
from checked_runs import MODEL, NO_GPU, problems_of

from megagrpo.config.load import dump_config, load_config
from megagrpo.errors import ConfigError
from megagrpo.parallel.alignment import token_alignment
from megagrpo.planning.checks import check_config, verify_config

OVER_KEPT = (
    "vLLM's log-probs are over the tokens it kept, the actor's over all (at rollout.temperature 1 "
    "engine.server.options {logprobs_mode: raw_logprobs} has them over all)"
)


def test_defaults_have_no_problem(run_file):
    assert problems_of(run_file) == []
    assert verify_config(load_config(run_file), 1) == MODEL


@pytest.mark.parametrize(
    ("world_size", "overrides", "line"),
    [
        (
            1,
            ["update.offload=[gradients,optimizer]"],
            "update.offload: gradients, optimizer: comes back for each update, while the engine keeps its "
            "memory; set engine.sleep_while_training: true, or leave it out",
        ),
        (
            1,
            ["update.offload=[reference]", "engine.sleep_while_training=true", "algorithm.kl.coef=0"],
            "update.offload: reference: algorithm.kl.coef is 0, there is none; leave it out",
        ),
        (
            1,
            ["precision.gradients=bf16"],
            "precision.gradients: bf16: buffers have the type of the parameters, float32 under this "
            "precision.recipe; take fp32, or recipe bf16",
        ),
        (
            6,
            ["parallel.tp=2", "parallel.pp=2"],
            "parallel: 6 ranks are not a multiple of tp 2 * pp 2 = 4; on 6 ranks these work: tp 2, dp 3 | "
            "pp 2, dp 3 | dp 6",
        ),
        (
            4,
            ["parallel.tp=4"],
            "parallel: 2 key-value heads are not a multiple of tp 4: 2 / 4 = 0.5; "
            "on 4 ranks these work: tp 2, dp 2 | tp 2, pp 2, dp 1 | dp 4",
        ),
        (
            3,
            ["parallel.pp=3"],
            "parallel: 4 layers are not a multiple of pp 3: 4 / 3 = 1.33333; on 3 ranks these work: dp 3",
        ),
        (
            2,
            ["parallel.pp=2", "parallel.layers_first_stage=5"],
            "parallel: 4 layers - 5 (layers_first_stage) = -1, too few for 1 middle stages of at least 1; "
            "on 2 ranks these work: pp 2, dp 1 | dp 2 | tp 2, dp 1",
        ),
        (
            2,
            ["parallel.cp=2", "update.max_tokens_per_microbatch=769", "data.max_prompt_tokens=513"],
            "update.max_tokens_per_microbatch: 769 (768 in multiples of 4): one sequence can have "
            "data.max_prompt_tokens 513 + "
            "rollout.max_new_tokens 256 = 769 tokens",
        ),
        (
            1,
            ["parallel.overlap_param_gather=true"],
            "parallel.overlap_param_gather: true: needs overlap_grad_reduce: true, whose buckets it gathers",
        ),
        (
            1,
            ["parallel.sp=true"],
            "parallel.sp: true: shards activations over tp, which is 1; it needs tp > 1",
        ),
        (
            1,
            ["update.mini_batches_per_step=5"],
            "update.mini_batches_per_step: 5: does not divide rollout.prompts_per_step = 32; nearest that "
            "do: 4, 8",
        ),
        (
            1,
            ["update.mini_batches_per_step=64"],
            "update.mini_batches_per_step: 64: does not divide rollout.prompts_per_step = 32; nearest that "
            "do: 32",
        ),
        (
            4,
            ["rollout.prompts_per_step=1", "rollout.completions_per_prompt=2"],
            "rollout.prompts_per_step: 1: 1 prompts * 2 completions / 1 mini-batches = 2 sequences for dp 4; "
            "each replica needs at least one",
        ),
        (
            1,
            ["update.max_tokens_per_microbatch=700"],
            "update.max_tokens_per_microbatch: 700: one sequence can have "
            "data.max_prompt_tokens 512 + rollout.max_new_tokens 256 = 768 tokens",
        ),
        (
            2,
            [
                "parallel.tp=2",
                "parallel.sp=true",
                "update.max_tokens_per_microbatch=769",
                "data.max_prompt_tokens=513",
            ],
            "update.max_tokens_per_microbatch: 769 (768 in multiples of 2): one sequence can have "
            "data.max_prompt_tokens 513 + "
            "rollout.max_new_tokens 256 = 769 tokens",
        ),
        (
            1,
            ["rollout.max_new_tokens=600"],
            "rollout.max_new_tokens: 600: data.max_prompt_tokens 512 + rollout.max_new_tokens 600 = 1112 "
            "tokens, "
            "but the model has 1024 positions (max_position_embeddings)",
        ),
        (
            1,
            ["engine.max_prefill_tokens=100"],
            "engine.max_prefill_tokens: 100: one prompt can have data.max_prompt_tokens = 512",
        ),
        (
            1,
            ["engine.name=vllm", "rollout.top_p=0.9", "rollout.top_k=20", "algorithm.old_logprobs=engine"],
            f"algorithm.old_logprobs: engine: with rollout.top_p 0.9 and top_k 20 {OVER_KEPT}; "
            "take actor, or top_p 1 and top_k 0",
        ),
        (
            1,
            ["engine.name=vllm", "rollout.top_p=0.9", "algorithm.correction.importance=token"],
            f"algorithm.correction: with rollout.top_p 0.9 {OVER_KEPT}, so an unchanged policy would be "
            "corrected; leave it out, or take top_p 1 and top_k 0, or another engine",
        ),
        (
            1,
            ["engine.name=vllm", "rollout.top_k=20", "rollout.logprob_gap.stop_above_mean=1e-4"],
            f"rollout.logprob_gap.stop_above_mean: 0.0001: with rollout.top_k 20 {OVER_KEPT}; leave it out, "
            "or take top_p 1 and top_k 0",
        ),
        (
            1,
            [
                "engine.name=vllm",
                "engine.server.options={logprobs_mode: raw_logprobs}",
                "rollout.temperature=0.7",
            ],
            "engine.server.options.logprobs_mode: raw_logprobs: are those of temperature 1, and "
            "rollout.temperature is 0.7; leave it out",
        ),
        (
            1,
            ["rollout.off_policy=one_step_off"],
            "rollout.off_policy: one_step_off: completions come from older weights, and nothing corrects "
            "for it; set "
            "algorithm.correction (say, importance: token), or algorithm.old_logprobs: engine, whose ratio "
            "holds the difference",
        ),
        (
            1,
            ["rollout.stop_token_ids=[7, 100, -1]"],
            "rollout.stop_token_ids: 100, -1: the model's token ids are 0 to 99",
        ),
        (
            1,
            [
                "rollout.completions_per_prompt=1",
                "algorithm.advantages=reinforce_pp",
                "algorithm.dynamic_sampling.enabled=true",
            ],
            "rollout.completions_per_prompt: 1: must be at least 2; algorithm.dynamic_sampling drops groups "
            "of equal rewards, so every group",
        ),
        (
            1,
            ["run.steps=5", "update.mini_batches_per_step=2", "optimizer.warmup_steps=10"],
            "optimizer.warmup_steps: 10: must be less than the 10 optimizer updates of the run (run.steps 5 "
            "* 2 mini-batches * 1 epochs)",
        ),
        (
            1,
            ["evaluation.sets=[{name: a, source: train.jsonl}, {name: a, source: train.jsonl}]"],
            "evaluation.sets.1.name: a: another set has this name",
        ),
        (
            1,
            ["evaluation.sets=[{name: a/b, source: train.jsonl}]"],
            "evaluation.sets.0.name: a/b: becomes the metric eval/NAME: it must not be empty or hold a slash",
        ),
        (
            1,
            ["precision.recipe=mxfp8"],
            "precision.recipe: mxfp8: needs Transformer Engine on CUDA; missing here: an NVIDIA GPU and a "
            "CUDA build of torch and "
            "Transformer Engine (pip install 'transformer-engine[pytorch]'); use fp32 or bf16, or "
            "precision.emulate to study it",
        ),
        (1, ["model.path=nowhere"], "model.path: nowhere: no such folder"),
        (
            1,
            ["model.path=."],
            "model.path: .: no config.json in it; an HF folder has config.json, safetensors and a tokenizer",
        ),
        (1, ["model.tokenizer=nowhere"], "model.tokenizer: nowhere: no such folder"),
        (1, ["data.source=gone.jsonl"], "data.source: gone.jsonl: no such file"),
        (1, ["data.source=gone.py:rows"], "data.source: gone.py: no such file"),
        (1, ["rewards.functions.0.name=gone.py:score"], "rewards.functions.0.name: gone.py: no such file"),
        (
            1,
            ["evaluation.sets=[{name: a, source: gone.jsonl}]"],
            "evaluation.sets.0.source: gone.jsonl: no such file",
        ),
    ],
)
def test_each_mistake_is_one_line_with_its_arithmetic(run_file, world_size, overrides, line):
    assert problems_of(run_file, *overrides, world_size=world_size) == [line]


def test_all_mistakes_come_together(run_file):
    (run_file.parent / "empty.jsonl").write_text("")
    (run_file.parent / "model" / "config.json").write_text("[]")
    overrides = ["data.source=empty.jsonl", "parallel.tp=2", "update.mini_batches_per_step=3"]
    with pytest.raises(ConfigError) as caught:
        verify_config(load_config(run_file, overrides), 3)
    assert [line.split(": ")[0] for line in caught.value.problems] == [
        "model.path",
        "data.source",
        "parallel",
        "update.mini_batches_per_step",
    ]


def test_token_counts_are_aligned_to_cp_and_tp_and_to_fp8_blocks(run_file):
    for overrides, alignment in (
        ([], 1),
        (["parallel.tp=2"], 1),
        (["parallel.tp=2", "parallel.sp=true"], 2),
        (["parallel.tp=3", "parallel.sp=true", "precision.recipe=mxfp8"], 96),
        # each tp rank casts its own share: 16 rows of it, or whole blocks of 128
        (["parallel.tp=4", "parallel.sp=true", "precision.recipe=fp8_delayed"], 64),
        (["parallel.tp=4", "precision.recipe=fp8_delayed"], 16),
        (["parallel.tp=4", "parallel.sp=true", "precision.recipe=fp8_blockwise"], 512),
        (["parallel.tp=4", "precision.recipe=fp8_blockwise"], 16),
        (["parallel.cp=2"], 4),  # two chunks on each of two ranks
        (["parallel.cp=4", "parallel.tp=2"], 8),
        # four tokens a rank: one for each tp rank
        (["parallel.cp=2", "parallel.tp=4", "parallel.sp=true"], 8),
        (["parallel.cp=2", "parallel.tp=3", "parallel.sp=true"], 12),
        (["parallel.cp=2", "precision.recipe=fp8_delayed"], 32),
    ):
        config = load_config(run_file, overrides)
        assert token_alignment(config.parallel, config.precision.recipe) == alignment


def test_loading_and_checking_import_no_torch(run_file):
    code = (
        "import sys; from megagrpo.config.load import load_config; from megagrpo.planning.checks import "
        "verify_config; "
        "import megagrpo.planning.dry_run; "
        f"verify_config(load_config({str(run_file)!r}, ['algorithm.preset=null']), 1); "
        "sys.exit(int(bool({'torch', 'megatron', 'transformers'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce_pp"])
def test_every_preset_loads_passes_the_checks_and_reloads_unchanged(run_file, preset):
    config = load_config(run_file, [f"algorithm.preset={preset}"])
    assert check_config(config, 1, MODEL, NO_GPU) == []
    (run_file.parent / "resolved.yaml").write_text(dump_config(config))
    assert load_config(run_file.parent / "resolved.yaml") == config


def test_an_unknown_preset_is_told_with_all_other_mistakes(run_file):
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, ["algorithm.preset=dpo", "run.steps=0"])
    assert caught.value.problems[0].startswith(
        "algorithm.preset: 'dpo' is not a preset; did you mean dapo?; known: "
    )
    assert caught.value.problems[1:] == ["run.steps: 0: must be at least 1"]
