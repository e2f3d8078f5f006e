"""`megagrpo init`: a commented configuration for a model, a task and GPUs, that trains as it is."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.config.model_folder import is_megatron_checkpoint
from megagrpo.config.training_sections import ModelConfig
from megagrpo.errors import UserError
from megagrpo.planning.file_checks import read_hf_config

TASK_FILE = "task.py"
_BYTES_A_PARAMETER = 6  # bf16 weights and float32 gradients; the optimizer's 12 are shared over dp
_OPTIMIZER_BYTES = 12
_TRAINING_SHARE = 0.5  # the part of a GPU's memory for it: activations and the engine need the rest
_SMALL = 1e9  # parameters below which a higher learning rate is usual
_GPUS_OF_A_HOST = 8

_TEMPLATE = """\
# {model} by GRPO, {hardware}. Every field: megagrpo config
#   megagrpo run {file} --nproc {ranks} --dry-run     what it would do
#   megagrpo run {file} --nproc {ranks}
run:
  dir: runs/{name} # config, metrics, completions, checkpoints, the final HF folder
  steps: {steps}

model:
  path: {model} # HF folder

data:
  source: {source} # .jsonl, .json, .csv, .parquet, or FILE.py:function that returns rows
  prompt_field: prompt # column with the prompt: text, or chat messages
  chat_template: {chat} # true: wrap the prompt as a user message
  max_prompt_tokens: {prompt_tokens}

parallel: # megagrpo run tells what fits the model where this does not
  tp: {tp} # dp is what is left: ranks / (tp * pp * cp)

precision:
  recipe: {recipe}

engine:
{engine}

rollout:
  prompts_per_step: {prompts}
  completions_per_prompt: 8 # a group: its members are compared with one another
  max_new_tokens: {new_tokens} # longer answers are cut
  temperature: 1.0{stop}

algorithm:
  preset: grpo # megagrpo config presets; any field below it can be overridden

optimizer:
  lr: {lr}

update:
  max_tokens_per_microbatch: {budget} # memory of activations; lower it when that runs out

rewards:
  functions:
    - name: {reward} # or math, exact_match, format: megagrpo config rewards

evaluation:
  every: {every}
  sets:
    - name: held_out
      source: {held_out}
      completions_per_prompt: 4

checkpoint:
  every: {every} # started again with the same command, the run goes on from the newest
"""


def write_starter(
    file: Path, model: str, source: str | None, reward: str | None, gpus: int, gpu_memory_gb: float
) -> list[Path]:
    """Write a configuration, and the task it needs where no data is given; return what was written.

    Args:
        file: of the configuration; it must not exist.
        model: HF folder.
        source: training rows; None: a small task is written beside `file`.
        reward: name or FILE.py:function; None: that of the task.
        gpus: of one host or several; 0: the CPU.
        gpu_memory_gb: of one of them.

    Raises:
        UserError: something is in the way, or missing.
    """
    task = file.parent / TASK_FILE
    for path in (file, task) if source is None else (file,):
        if path.exists():
            raise UserError(f"{path}: is there already; name another file")
    if source is not None and reward is None:
        raise UserError("--reward: missing; with --data name the reward too (megagrpo config rewards)")
    hf = read_hf_config(ModelConfig(path=str(model)))
    if hf is None or is_megatron_checkpoint(model):
        raise UserError(
            f"--model {model}: no HF folder with a config.json; `hf download {model} --local-dir "
            f"models/{Path(model).name}` fetches one from the hub"
        )
    text = _TEMPLATE.format_map(
        {"file": file, "name": file.stem, "model": model}
        | _scale(hf, gpus, gpu_memory_gb)
        | _task(task if source is None else None, source, reward)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if source is not None:
        return [file]
    from megagrpo.planning import starter_task

    task.write_text(Path(starter_task.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return [file, task]


def _task(task: Path | None, source: str | None, reward: str | None) -> dict[str, Any]:
    if task is None:
        sizes = {"prompt_tokens": 512, "new_tokens": 1024, "stop": "", "chat": "true"}
        return sizes | {"source": source, "held_out": f"{source} # take other rows", "reward": reward}
    sizes = {"prompt_tokens": 48, "new_tokens": 8, "stop": '\n  stop: ["\\n"]', "chat": "false"}
    return sizes | {
        "source": f"{task}:train_rows",
        "held_out": f"{task}:eval_rows",
        "reward": reward or f"{task}:reward",
    }


def _scale(hf: Mapping[str, Any], gpus: int, gpu_memory_gb: float) -> dict[str, Any]:
    size = count_parameters(hf)
    common = {"lr": "2.0e-5" if size < _SMALL else "1.0e-6"}
    if not gpus:
        engine = "  name: transformers # in the ranks; vllm and sglang start servers (make engines)"
        return common | {
            "hardware": "on the CPU",
            "ranks": 1,
            "steps": 10,
            "tp": 1,
            "recipe": "fp32",
            "engine": engine,
            "prompts": 8,
            "budget": 4096,
            "every": 5,
        }
    tp = tensor_parallel(hf, size, gpus, gpu_memory_gb * 1e9)
    has_vllm = importlib.util.find_spec("vllm") or (Path(".engines") / "vllm" / "bin" / "python").is_file()
    engine = (
        f"  name: vllm\n  server: {{ replicas: {gpus // tp}, tensor_parallel: {tp} }}\n"
        "  sleep_while_training: true # its memory is the update's"
        if has_vllm
        else "  name: transformers # vllm is faster: pip install 'megagrpo[vllm]', then name: vllm"
    )
    return common | {
        "hardware": f"on {gpus} GPU{'s' * (gpus > 1)}",
        "ranks": min(gpus, _GPUS_OF_A_HOST),
        "steps": 200,
        "tp": f"{tp}\n  sp: true" if tp > 1 else 1,
        "recipe": "bf16",
        "engine": engine,
        "prompts": max(32, gpus // tp),
        "budget": 8192,
        "every": 20,
    }


def count_parameters(hf: Mapping[str, Any]) -> float:
    """Return about how many parameters a decoder of this config.json has."""
    hidden, layers = hf.get("hidden_size", 0), hf.get("num_hidden_layers", 0)
    heads = hf.get("num_attention_heads", 1)
    head = hf.get("head_dim") or hidden // heads
    attention = hidden * head * (2 * heads + 2 * hf.get("num_key_value_heads", heads))
    experts = hf.get("num_experts") or hf.get("num_local_experts") or 1
    inner = hf.get("moe_intermediate_size") if experts > 1 else None
    mlp = 3 * hidden * (inner or hf.get("intermediate_size", 0)) * experts
    embeddings = hf.get("vocab_size", 0) * hidden * (1 if hf.get("tie_word_embeddings") else 2)
    return layers * (attention + mlp) + embeddings


def tensor_parallel(hf: Mapping[str, Any], size: float, gpus: int, gpu_bytes: float) -> int:
    """Return the smallest tensor parallel size whose weights, gradients and optimizer fit `_TRAINING_SHARE`
    of a GPU; the largest possible one where none does.
    """
    heads = hf.get("num_attention_heads", 1)
    divisors = [heads, hf.get("num_key_value_heads", heads), gpus]
    possible = [tp for tp in (1, 2, 4, 8) if all(number % tp == 0 for number in divisors)]
    for tp in possible:
        if size * (_BYTES_A_PARAMETER / tp + _OPTIMIZER_BYTES / gpus) <= _TRAINING_SHARE * gpu_bytes:
            return tp
    return possible[-1]
