"""How vLLM's API server is started, with our weight receiver in its workers."""

import os
from collections.abc import Mapping
from typing import Any

from megagrpo.device.environment import thread_environment
from megagrpo.device.memory import share_of_device_memory
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

_CPU_KV_CACHE_BYTES = 2**30
_CPU_BLOCK_TOKENS = 32  # vLLM's smallest on a CPU: prompts are shared in whole blocks, and its default is 128


def vllm_command(model: ServedModel) -> ServerCommand:
    """Return how the server of a model is started."""
    return ServerCommand(
        PACKAGES["vllm"],
        health_path="/health",
        # /health looks at processes: one that hangs is well. The workers answer between two steps.
        sign_of_life=Call("/collective_rpc", {"method": "describe_transfer"}),
        words=lambda python, port: _words(model, python, port),
        environment=lambda: _environment(model),
    )


def _words(model: ServedModel, python: str, port: int) -> list[str]:
    arguments: dict[str, Any] = {
        "model": str(model.folder),
        "served_model_name": "policy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.context_tokens,
        "max_num_seqs": model.config.max_batch_completions,
        # A batch must hold one token of each sequence.
        "max_num_batched_tokens": max(model.config.max_prefill_tokens, model.config.max_batch_completions),
        "tensor_parallel_size": model.config.server.tensor_parallel,
        "worker_extension_cls": "megagrpo.host.vllm.weight_receiver.WeightReceiver",
        "scheduler_cls": "megagrpo.host.vllm.scheduler.build_scheduler",
        "weight_transfer_config": {"backend": "megagrpo"},  # host/vllm/transfer.py registers it
        # log-probs of the distribution that is sampled, not of the raw logits
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the folder's own sampling defaults would change what is sampled
        "load_format": "auto" if model.load_weights else "dummy",
        "enable_scale_out": True,  # the route that takes and returns token ids
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        "seed": 0,  # unused: every request brings its own
    }
    if model.quantization_config is not None:
        arguments |= {"hf_overrides": {"quantization_config": model.quantization_config}}
    if model.tokenizer_folder is None:
        arguments |= {"skip_tokenizer_init": True}
    else:
        arguments |= {"tokenizer": model.tokenizer_folder}
    if model.device.type == "cpu":
        arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS}
        arguments |= {"kv_cache_memory_bytes": model.config.server.kv_cache_bytes or _CPU_KV_CACHE_BYTES}
    else:
        arguments |= {"enable_sleep_mode": True}
        share = share_of_device_memory(model.config.server.gpu_memory_fraction)
        arguments |= {"gpu_memory_utilization": share}
        arguments |= (
            {"kv_cache_memory_bytes": model.config.server.kv_cache_bytes}
            if model.config.server.kv_cache_bytes
            else {}
        )
    return [
        *host_command(python, "megagrpo.host.vllm.server"),
        *command_line_arguments(arguments | model.config.server.options),
    ]


def _environment(model: ServedModel) -> Mapping[str, str]:
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that pause, reset caches and call workers
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HOST_PATH),
    }
    if model.device.type == "cpu":
        environment |= thread_environment(
            model.config.server.tensor_parallel * model.config.server.num_replicas
        )
        environment |= {
            # its own binding leaves a core out and can't know of the trainer's ranks
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # the first request with log-probs would compile for seconds
        }
    else:
        first = model.device.index or 0
        environment |= device_environment(
            first, model.config.server.tensor_parallel, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    return environment
