"""Mistakes on the command line, one line each: place, value, what is allowed, before anything is built.

With those of test_mistakes.py these are the hundred and more that a newcomer's walk through the product made.
"""

import pytest
from test_mistakes import folder, tell  # noqa: F401 (fixtures)

# override -> how each line begins; what follows are lists of names, which grow
MISTAKES = {
    "rollout.prompt_per_step=4": [
        "rollout.prompt_per_step: not a field; did you mean prompts_per_step?",
    ],
    "rolout.top_p=1": [
        "rolout: not a field; did you mean rollout?",
    ],
    "parallel.tp=0": [
        "parallel.tp: 0: must be at least 1",
    ],
    "parallel.tp=3": [
        "parallel: 4 attention heads are not a multiple of tp 3: 4 / 3 = 1.33333",
        "parallel: 32 feed-forward columns are not a multiple of tp 3: 32 / 3 = 10.6667; "
        "on 3 ranks these work: dp 3",
    ],
    "parallel.pp=4": [
        "parallel: 2 layers are not a multiple of pp 4: 2 / 4 = 0.5; on 4 ranks these "
        "work: pp 2, dp 2 | tp 2, pp 2, dp 1 | dp 4",
    ],
    "rollout.prompts_per_step=2.5": [
        "rollout.prompts_per_step: 2.5: must be a whole number",
    ],
    "rollout.completions_per_prompt=1": [
        "algorithm.advantages: grpo compares completions of one prompt; "
        "rollout.completions_per_prompt is 1 and must be at least 2",
    ],
    "rollout.temperature=0": [
        "rollout.temperature: 0: must be greater than 0",
    ],
    "rollout.temperature=-1": [
        "rollout.temperature: -1: must be greater than 0",
    ],
    "rollout.temperature=hot": [
        'rollout.temperature: "hot": must be a number',
    ],
    "rollout.top_p=0": [
        "rollout.top_p: 0: must be greater than 0",
    ],
    "rollout.top_p=1.5": [
        "rollout.top_p: 1.5: must be at most 1",
    ],
    "rollout.top_k=-1": [
        "rollout.top_k: -1: must be at least 0",
    ],
    "rollout.max_new_tokens=0": [
        "rollout.max_new_tokens: 0: must be at least 1",
    ],
    "rollout.max_new_tokens=5000": [
        "rollout.max_new_tokens: 5000: data.max_prompt_tokens 512 + "
        "rollout.max_new_tokens 5000 = 5512 tokens, but the model has 1024 positions "
        "(max_position_embeddings)",
    ],
    "rollout.stop=end": [
        'rollout.stop: "end": must be a list',
    ],
    "rollout.off_policy=async": [
        'rollout.off_policy: "async": must be one of synchronous, one_step_off',
    ],
    "optimizer.lr=0": [
        "optimizer.lr: 0: must be greater than 0",
    ],
    "optimizer.lr=-1e-6": [
        "optimizer.lr: -1e-06: must be greater than 0",
    ],
    "optimizer.lr=1e-6x": [
        'optimizer.lr: "1e-6x": must be a number',
    ],
    "optimizer.schedule=cosin": [
        'optimizer.schedule: "cosin": must be one of constant, linear, cosine; did you mean cosine?',
    ],
    "optimizer.name=muon": [
        "optimizer.name: not a field; AdamW is the one optimizer",
    ],
    "optimizer.beta1=1.5": [
        "optimizer.beta1: 1.5: must be at most 1",
    ],
    "optimizer.warmup_steps=-1": [
        "optimizer.warmup_steps: -1: must be at least 0",
    ],
    "algorithm.preset=ppo": [
        "algorithm.preset: 'ppo' is not a preset; known:",
    ],
    "algorithm.preset=GRPO": [
        "algorithm.preset: 'GRPO' is not a preset; known:",
    ],
    "algorithm.advantages=gae": [
        "algorithm.advantages: no advantage estimator is called 'gae'; there are",
    ],
    "algorithm.loss=ppo": [
        "algorithm.loss: no loss is called 'ppo'; there are",
    ],
    "algorithm.clip_low=-0.1": [
        "algorithm.clip_low: -0.1: must be greater than 0",
    ],
    "algorithm.kl.estimator=k4": [
        'algorithm.kl.estimator: "k4": must be one of k1, k2, k3, abs, exact',
    ],
    "algorithm.kl.coef=-1": [
        "algorithm.kl.coef: -1: must be at least 0",
    ],
    "algorithm.kl.placement=both": [
        'algorithm.kl.placement: "both": must be one of loss, reward',
    ],
    "algorithm.aggregation=token-mean": [
        'algorithm.aggregation: "token-mean": must be one of sequence_mean, '
        "group_token_mean, token_mean, constant, sequence_sum; did you mean token_mean?",
    ],
    "algorithm.entropy_coef=x": [
        'algorithm.entropy_coef: "x": must be a number',
    ],
    "algorithm.dynamic_sampling.enabled=maybe": [
        'algorithm.dynamic_sampling.enabled: "maybe": must be true or false',
    ],
    "algorithm.correction.importance=tokens": [
        'algorithm.correction.importance: "tokens": must be one of none, token, sequence; '
        "did you mean token?",
    ],
    "precision.recipe=fp16": [
        'precision.recipe: "fp16": must be one of fp32, bf16, fp8_delayed, '
        "fp8_tensorwise, fp8_blockwise, mxfp8; did you mean bf16?",
    ],
    "precision.recipe=fp8_delayed": [
        "precision.recipe: fp8_delayed: needs Transformer Engine on CUDA; missing here: "
        "an NVIDIA GPU and a CUDA build of torch and Transformer Engine (pip install "
        "'transformer-engine[pytorch]'); use fp32 or bf16",
    ],
    "model.attention=flash": [
        'model.attention: "flash": must be one of auto, local, te',
    ],
    "model.path=nope": [
        "model.path: nope: no such folder",
    ],
    "model.lora.rank=8": [
        "model.lora: not a field; all weights are trained, there are no adapters",
    ],
    "parallel.fsdp=2": [
        "parallel.fsdp: not a field; weights are sharded by tp, pp, cp and ep, and "
        "optimizer states over dp by themselves",
    ],
    "parallel.vpp=1": [
        "parallel.vpp: 1: must be at least 2",
    ],
    "parallel.cp=0": [
        "parallel.cp: 0: must be at least 1",
    ],
    "parallel.ep=2": [
        "parallel: ep 2 does not divide cp * dp = 1 * 1 = 1",
        "parallel: ep 2: the model has no experts",
    ],
    "update.mini_batches_per_step=3": [
        "update.mini_batches_per_step: 3: does not divide rollout.prompts_per_step = 4; "
        "nearest that do: 2, 4",
    ],
    "update.max_tokens_per_microbatch=100": [
        "update.max_tokens_per_microbatch: 100: one sequence can have "
        "data.max_prompt_tokens 512 + rollout.max_new_tokens 256 = 768 tokens",
    ],
    "update.recompute=yes": [
        'update.recompute.0: "yes": must be one of full, core_attn, layernorm, mlp, moe_act',
    ],
    "update.packing=1": [
        "update.packing: 1: must be true or false",
    ],
    "update.epochs_per_step=0": [
        "update.epochs_per_step: 0: must be at least 1",
    ],
    "engine.name=vlm": [
        "engine.name: no engine is called 'vlm'; did you mean vllm?; there are",
    ],
    "engine.name=vllm": [
        "engine.name: vllm: is not installed here: run",
    ],
    "engine.replicas=2": [
        "engine.replicas: not a field; it is engine.server.replicas now",
    ],
    "engine.server.replicas=2": [
        "engine.server: not a field; it is one of engine.name vllm, engine.name sglang, "
        "engine.name FILE.py:NAME",
    ],
    "rewards.functions=[]": [
        "rewards.functions: []: must have at least one entry",
    ],
    "rewards.functions.0.name=mth": [
        "rewards.functions.0.name: no reward is called 'mth'; did you mean math?; there are",
    ],
    "rewards.functions.0.options={colum: a}": [
        "rewards.functions.0.options.colum: not an option of exact_match; did you mean column?; its options:",
    ],
    "rewards.workers=0": [
        "rewards.workers: 0: must be at least 1",
    ],
    "rewards.timeout_seconds=0": [
        "rewards.timeout_seconds: 0: must be greater than 0",
    ],
    "rewards.special_tokens=kept": [
        'rewards.special_tokens: "kept": must be one of strip, keep; did you mean keep?',
    ],
    "data.source=nope.jsonl": [
        "data.source: nope.jsonl: no such file",
    ],
    "data.chat_template=ja": [
        'data.chat_template: "ja": must be true or false',
    ],
    "data.max_prompt_tokens=0": [
        "data.max_prompt_tokens: 0: must be at least 1",
    ],
    "data.overlong_prompts=skip": [
        'data.overlong_prompts: "skip": must be one of error, drop',
    ],
    "data.limit=0": [
        "data.limit: 0: must be at least 1",
    ],
    "evaluation.every=-1": [
        "evaluation.every: -1: must be at least 0",
    ],
    "evaluation.sets=[{name: a}]": [
        "evaluation.sets.0.source: missing",
    ],
    "evaluation.sets=[{name: a, source: no.jsonl}]": [
        "evaluation.sets.0.source: no.jsonl: no such file",
    ],
    "evaluation.sets=[{name: a, source: train.jsonl, temperature: -1}]": [
        "evaluation.sets.0.temperature: -1: must be at least 0",
    ],
    "evaluation.sets=[{name: a, source: train.jsonl}, {name: a, source: train.jsonl}]": [
        "evaluation.sets.1.name: a: another set has this name",
    ],
    "checkpoint.every=-5": [
        "checkpoint.every: -5: must be at least 0",
    ],
    "checkpoint.keep_best=2": [
        "checkpoint.best_metric: missing: keep_best needs the name of a held-out set, and "
        "evaluation.sets has none",
    ],
    "checkpoint.best_mode=maximum": [
        'checkpoint.best_mode: "maximum": must be one of max, min; did you mean max?',
    ],
    "telemetry.writers=[tensorboard]": [
        "telemetry.writers: jsonl must be one of them; summary and report read metrics.jsonl",
    ],
    "telemetry.writers=[jsonl, jsonl]": [
        "telemetry.writers: one of them is named twice",
    ],
    "run.steps=0": [
        "run.steps: 0: must be at least 1",
    ],
    "run.steps=many": [
        'run.steps: "many": must be a whole number',
    ],
    "run.seed=x": [
        'run.seed: "x": must be a whole number',
    ],
    "run.resume=yes": [
        'run.resume: "yes": must be one of auto, never',
    ],
    "run.dir=": [
        "run.dir: null: must be a string",
    ],
    "run.dir=train.jsonl": [
        "run.dir: train.jsonl: is a file; a folder is wanted",
    ],
    "watchdog.factor=0": [
        "watchdog.factor: 0: must be greater than 0",
    ],
    "spikes.action=stop": [
        'spikes.action: "stop": must be one of warn, skip, roll_back',
    ],
    "spikes.action=roll_back": [
        "spikes.action: roll_back: needs checkpoints to go back to; set checkpoint.every",
        "spikes.action: roll_back: nothing is judged; set loss_factor, grad_norm_factor or reward_fraction",
    ],
    "weights.transport.kind=nccl": [
        'weights.transport.kind: "nccl": must be one of auto, shared_memory, group, ipc, disk',
    ],
    "weights.bucket_bytes=0": [
        "weights.bucket_bytes: 0: must be at least 1",
    ],
    "weights.probe_tokens=-1": [
        "weights.probe_tokens: -1: must be at least 0",
    ],
    "export.dtype=fp8": [
        'export.dtype: "fp8": must be one of source, float32, bfloat16',
    ],
    "num_generations=8": [
        "num_generations: not a field; here it is rollout.completions_per_prompt",
    ],
    "rollout.n=8": [
        "rollout.n: not a field; here it is rollout.completions_per_prompt",
    ],
    "data.train_batch_size=4": [
        "data.train_batch_size: not a field; here it is rollout.prompts_per_step",
    ],
    "trainer.total_epochs=1": [
        "trainer: not a field; its fields are in run, checkpoint, evaluation and telemetry here",
    ],
    "rollout.temperature": [
        "rollout.temperature: an override is written section.field=value",
    ],
    "=1": [
        "=1: an override is written section.field=value",
    ],
    "rollout.temperature=": [
        "rollout.temperature: null: must be a number",
    ],
    "rollout=5": [
        "rollout: 5: must be a section with some of the fields",
    ],
    "rewards=math": [
        'rewards: "math": must be a section with some of the fields',
    ],
    "model=path": [
        'model: "path": must be a section with some of the fields',
    ],
    "parallel=[1]": [
        "parallel: [1]: must be a section with some of the fields",
    ],
}


@pytest.mark.parametrize("override", MISTAKES)
def test_an_override_that_can_not_be_is_told_before_the_launch(override, tell):  # noqa: F811
    code, said, launched = tell(override)
    assert (code, launched) == (2, False)
    assert [line[: len(start)] for line, start in zip(said, MISTAKES[override], strict=True)] == MISTAKES[
        override
    ]


def test_lines_name_the_place_and_the_value_or_what_is_there_instead():
    for override, lines in MISTAKES.items():
        place = override.partition("=")[0].split(".")[0] or "="
        assert all(place in line for line in lines), override
