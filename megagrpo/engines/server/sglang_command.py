"""How an SGLang server is started, with our sampler and weight updates in its processes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.device.environment import thread_environment
from megagrpo.engines.server.command import (
    HOST_PATH,
    PACKAGES,
    ServerCommand,
    command_line_arguments,
    device_environment,
    host_command,
)
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.served_model import ServedModel

_RESERVED_TOKENS = 8  # SGLang ends a request a few tokens short of the context it is given
_CPU_KV_CACHE_BYTES = 2**30


def sglang_command(model: ServedModel) -> ServerCommand:
    """Return how the server of a model is started."""
    return ServerCommand(
        PACKAGES["sglang"],
        health_path="/model_info",  # /health generates a token and takes a second
        sign_of_life=Call("/server_info", method="GET"),  # asks the scheduler
        words=lambda python, port: _words(model, python, port),
        environment=lambda: _environment(model),
    )


def _words(model: ServedModel, python: str, port: int) -> list[str]:
    context = model.context_tokens + _RESERVED_TOKENS
    arguments: dict[str, Any] = {
        "model_path": str(model.folder),
        "served_model_name": "policy",
        "host": "127.0.0.1",
        "port": port,
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context_length": context,
        "max_running_requests": model.config.max_batch_completions,
        "max_prefill_tokens": model.config.max_prefill_tokens,
        "chunked_prefill_size": model.config.max_prefill_tokens,
        "max_total_tokens": _kv_cache_tokens(model, context),
        "tp_size": model.config.server.tensor_parallel,
        "sampling_backend": "pytorch",  # the name under which the server registers our sampler
        "load_format": "auto" if model.load_weights else "dummy",
        "weight_version": "0",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,  # a weight update finds no batch between two steps
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # else its loop takes half a core from the ranks while they train
        "log_level": "warning",
    }
    if model.quantization_config is not None:
        arguments |= {"json_model_override_args": {"quantization_config": model.quantization_config}}
    arguments |= (
        {"tokenizer_path": model.tokenizer_folder}
        if model.tokenizer_folder
        else {"skip_tokenizer_init": True}
    )
    if model.device.type == "cpu":
        arguments |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
    else:
        arguments |= {"enable_memory_saver": True}  # what sleep() gives back
        arguments |= {"enable_weights_cpu_backup": model.config.server.sleep_keeps_weights}
        # SGLang takes a fraction of the memory that is free
        arguments |= {"mem_fraction_static": model.config.server.gpu_memory_fraction}
    return [
        *host_command(python, "megagrpo.host.sglang.server"),
        "--end-with-parent",
        *(["--offline"] if model.config.server.offline else []),
        *command_line_arguments(arguments | model.config.server.options),
    ]


def _environment(model: ServedModel) -> Mapping[str, str]:
    environment = {
        "PYTHONPATH": str(HOST_PATH),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the reserved tokens
        # Under torchrun the server would look for its own process group's store at the trainer's.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if model.device.type == "cpu":
        environment |= thread_environment(
            model.config.server.tensor_parallel * model.config.server.num_replicas
        )
        environment |= {
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a small model's whole rollout
            "SGLANG_CPU_OMP_THREADS_BIND": cores_by_rank(
                sorted(os.sched_getaffinity(0)), model.config.server.tensor_parallel
            ),
        }
    else:
        environment |= device_environment(
            model.device.index or 0,
            model.config.server.tensor_parallel,
            os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
    return environment


def _kv_cache_tokens(model: ServedModel, context: int) -> int | None:
    """Return the tokens that the key/value cache has room for: no more than can be in use; None leaves
    it to the server.
    """
    if model.config.server.kv_cache_bytes is None and model.device.type != "cpu":
        return None
    heads = model.hf.num_key_value_heads or model.hf.num_attention_heads
    head_size = getattr(model.hf, "head_dim", None) or model.hf.hidden_size // model.hf.num_attention_heads
    heads_of_rank = -(-heads // model.config.server.tensor_parallel)
    token_bytes = 2 * model.hf.num_hidden_layers * heads_of_rank * head_size * model.dtype.itemsize
    budget = (model.config.server.kv_cache_bytes or _CPU_KV_CACHE_BYTES) // token_bytes
    return max(context, min(budget, context * model.config.max_batch_completions))


def cores_by_rank(cores: Sequence[int], num_ranks: int) -> str:
    """Return which cores each engine rank gets, as SGLang writes it; without it a CPU must have a NUMA
    node for each rank.
    """
    share = max(1, len(cores) // num_ranks)
    groups = [
        [cores[(rank * share + place) % len(cores)] for place in range(share)] for rank in range(num_ranks)
    ]
    return "|".join(",".join(map(str, group)) for group in groups)
