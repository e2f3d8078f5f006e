"""Engine `vllm`: vLLM's API server with our weight receiver in its workers."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megagrpo.device.launch import thread_environment
from megagrpo.device.memory import share_of_device_memory
from megagrpo.engines.base import EngineError
from megagrpo.engines.completions import Sample
from megagrpo.engines.request_checks import prompt_seed
from megagrpo.engines.server.arguments import (
    HOST_PATH,
    command_line_arguments,
    device_environment,
    host_command,
)
from megagrpo.engines.server.engine import RemoteEngine
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.protocol import ParameterDescription
from megagrpo.engines.server.python_environment import PACKAGES
from megagrpo.engines.server.weights import Ack
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.manifest import BucketManifest
from megagrpo.wire.transfer_group import GroupAddress

_REQUEST_PREFIX = "generate-tokens-"  # the server's own, before the request ids of its generate route
_CPU_KV_CACHE_BYTES = 2**30
_CPU_BLOCK_TOKENS = 32  # vLLM's smallest on a CPU: prompts are shared in whole blocks, and its default is 128


class VllmEngine(RemoteEngine):
    """A vLLM server: token ids in; token ids, log-probs at the sampling temperature and weight versions out.

    The samples of a prompt come from one request. vLLM gives sample i of a request the seed s + i and draws
    from a generator of its own for each, so a completion is a function of (seed, step, prompt, index,
    weights) as far as its logits do not depend on the batch.
    """

    package = PACKAGES["vllm"]
    _in_transfer = False  # between /start_weight_update and /finish_weight_update

    @property
    def transports(self) -> tuple[str, ...]:
        """CUDA IPC where the server computes on the GPUs of the ranks."""
        return tuple(name for name in super().transports if name != "ipc" or self.device.type == "cuda")

    def server_command(self, python: str, port: int) -> list[str]:
        arguments: dict[str, Any] = {
            "model": str(self.model_folder),
            "served_model_name": "policy",
            "host": "127.0.0.1",
            "port": port,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.context_tokens,
            "max_num_seqs": self.config.max_batch_completions,
            # A batch must hold one token of each sequence.
            "max_num_batched_tokens": max(self.config.max_prefill_tokens, self.config.max_batch_completions),
            "tensor_parallel_size": self.config.server.tensor_parallel,
            "worker_extension_cls": "megagrpo.host.vllm.worker.WeightReceiver",
            "scheduler_cls": "megagrpo.host.vllm.scheduler.build_scheduler",
            "weight_transfer_config": {"backend": "megagrpo"},  # of host/vllm/transfer.py
            # of the distribution that is sampled, not of the raw logits
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # the folder's own sampling defaults would change what is sampled
            "load_format": "auto" if self.load_weights else "dummy",
            "enable_scale_out": True,  # the route that takes and returns token ids
            "disable_log_stats": True,
            "disable_uvicorn_access_log": True,
            "seed": 0,  # unused: every request brings its own
        }
        if self.quantization_config is not None:
            arguments |= {"hf_overrides": {"quantization_config": self.quantization_config}}
        if self._tokenizer_folder is None:
            arguments |= {"skip_tokenizer_init": True}
        else:
            arguments |= {"tokenizer": self._tokenizer_folder}
        if self.device.type == "cpu":
            arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS}
            arguments |= {"kv_cache_memory_bytes": self.config.server.kv_cache_bytes or _CPU_KV_CACHE_BYTES}
        else:
            arguments |= {"enable_sleep_mode": True}
            share = share_of_device_memory(self.config.server.gpu_memory_fraction)
            arguments |= {"gpu_memory_utilization": share}
            arguments |= (
                {"kv_cache_memory_bytes": self.config.server.kv_cache_bytes}
                if self.config.server.kv_cache_bytes
                else {}
            )
        return [
            *host_command(python, "megagrpo.host.vllm.server"),
            *command_line_arguments(arguments | self.config.server.options),
        ]

    def server_environment(self) -> Mapping[str, str]:
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that pause, reset caches and call workers
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HOST_PATH),
        }
        if self.device.type == "cpu":
            environment |= thread_environment(
                self.config.server.tensor_parallel * self.config.server.num_replicas
            )
            environment |= {
                # its own binding leaves a core out and can't know of the trainer's ranks
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCHDYNAMO_DISABLE": "1",  # the first request with log-probs would compile for seconds
            }
        else:
            first = self.device.index or 0
            environment |= device_environment(
                first, self.config.server.tensor_parallel, os.environ.get("CUDA_VISIBLE_DEVICES")
            )
        return environment

    def generate_call(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, indices: range
    ) -> Call:
        fields = {
            "n": len(indices),
            "seed": prompt_seed(sampling, prompt) + indices.start,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0,
            "ignore_eos": True,  # the end tokens are all in stop_token_ids
            "stop_token_ids": sorted(self.end_token_ids | set(sampling.stop_token_ids)),
            "detokenize": False,
        }
        # else completions are cut here, which costs the server tokens
        if sampling.stop and self._tokenizer_folder is not None:
            fields |= {"stop": list(sampling.stop), "detokenize": True, "skip_special_tokens": False}
        return "/inference/v1/generate", {
            "request_id": request_id,
            "token_ids": list(prompt.token_ids),
            "sampling_params": fields,
        }

    def abort_calls(self, requests: Mapping[str, int]) -> list[Call]:
        return [
            ("/abort_requests", {"request_ids": [_REQUEST_PREFIX + request_id for request_id in requests]})
        ]

    def read_samples(self, answer: Any) -> list[Sample]:
        return [
            Sample(
                token_ids=choice["token_ids"],
                logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                finish_reason=choice["finish_reason"],
                weight_versions=tuple(
                    (span["start"], int(span["version"])) for span in choice["weight_versions"] or ()
                ),
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def pause(self, abort: bool) -> None:
        self.client.call(f"/pause?mode={'abort' if abort else 'keep'}")

    def send_group(self, address: GroupAddress) -> None:
        # the last one ended in the middle
        if any(answer["is_open"] for answer in self._ask_workers("describe_transfer")):
            self.client.call("/finish_weight_update", {})
        self._in_transfer = False
        self.client.call("/init_weight_transfer_engine", {"init_info": asdict(address)})
        self._call_workers("describe_transfer")

    def send_bucket(self, manifest: BucketManifest) -> list[Ack]:
        if manifest.transport != "group":
            return self._call_workers("receive_bucket", manifest.to_json())
        if not self._in_transfer:
            self.client.call("/start_weight_update")
            self._in_transfer = True
        self.client.call("/update_weights", {"update_info": {"manifest": manifest.to_json()}})
        return self._call_workers("load_received")

    def commit_weights(self, version: int) -> None:
        if self._in_transfer:
            self.client.call("/finish_weight_update", {})
            self._in_transfer = False
        acks = self._call_workers("commit_weights", str(version))
        if any(ack["version"] != version for ack in acks) or len(acks) != self.engine_ranks:
            raise EngineError(f"weight version {version}: the engine's ranks committed {acks}")
        # The running requests' own keys and values go too: they are computed anew under the new weights.
        if not self.client.call("/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise EngineError(f"weight version {version}: the engine kept keys and values of older weights")
        self.client.call("/update_weight_version", {"new_version": str(version)})

    def resume(self, version: int) -> None:
        self.client.call("/resume")

    def describe_parameters(self) -> list[dict[str, ParameterDescription]]:
        return [answer["parameters"] for answer in self._call_workers("describe_parameters")]

    def parameter_checksums(self) -> list[dict[str, str]]:
        with self._connection.noting_loss():
            return [answer["checksums"] for answer in self._call_workers("checksum_parameters")]

    def set_asleep(self, asleep: bool) -> None:
        told = self.client.call("/sleep?level=1" if asleep else "/wake_up")["status"]
        if told != ("sleeping" if asleep else "awake"):  # a part of it may be left asleep
            raise EngineError(
                f"{self.address}: asked to {'sleep' if asleep else 'wake'}, the engine says that it is {told}"
            )

    def _call_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Call a method of the weight receiver on every worker; the answers by engine rank."""
        answers = self._ask_workers(method, *arguments)
        if refused := [answer["error"] for answer in answers if "error" in answer]:
            raise EngineError(refused[0])
        return sorted(answers, key=lambda answer: answer["rank"])

    def _ask_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        return self.client.call("/collective_rpc", {"method": method, "args": list(arguments)})["results"]
