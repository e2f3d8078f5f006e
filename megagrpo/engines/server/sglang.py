"""Engine `sglang`: an SGLang server that draws with our counters and reads weights by manifest."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megagrpo.device.launch import thread_environment
from megagrpo.engines.base import EngineError
from megagrpo.engines.completions import Sample
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
from megagrpo.engines.server.sglang_answers import read_sample
from megagrpo.engines.server.weights import Ack
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.counter_sampling import row_keys
from megagrpo.wire.manifest import BucketManifest
from megagrpo.wire.sglang_instructions import (
    checksums_body,
    commit_body,
    describe_body,
    load_body,
    read_reply,
    receive_body,
    serve_body,
)
from megagrpo.wire.transfer_group import GroupAddress

_RESERVED_TOKENS = 8  # SGLang ends a request a few tokens short of the context it is given
_CPU_KV_CACHE_BYTES = 2**30
_SHORT_PROMPT_TOKENS = 32  # computed again for every completion: that takes less than a round trip more


class SglangEngine(RemoteEngine):
    """An SGLang server: token ids in; token ids, log-probs of the sampled distribution and weight versions
    out.

    The server's sampler is ours (host/sglang/sampler.py), so a completion has the tokens that the embedded
    engine would draw, as far as their logits agree. While weights are written its requests are retracted:
    they keep their tokens, lose their keys and values, and go on under the new weights, which
    `weight_versions` tells token by token.
    """

    package = PACKAGES["sglang"]
    health_path = "/model_info"  # /health generates a token and takes a second

    def server_command(self, python: str, port: int) -> list[str]:
        context = self.context_tokens + _RESERVED_TOKENS
        arguments: dict[str, Any] = {
            "model_path": str(self.model_folder),
            "served_model_name": "policy",
            "host": "127.0.0.1",
            "port": port,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "context_length": context,
            "max_running_requests": self.config.max_batch_completions,
            "max_prefill_tokens": self.config.max_prefill_tokens,
            "chunked_prefill_size": self.config.max_prefill_tokens,
            "max_total_tokens": self._kv_cache_tokens(context),
            "tp_size": self.config.server.tensor_parallel,
            "sampling_backend": "pytorch",  # the name under which the server registers our sampler
            "load_format": "auto" if self.load_weights else "dummy",
            "weight_version": "0",
            "grammar_backend": "none",
            "disable_overlap_schedule": True,  # a weight update finds no batch between two steps
            "skip_server_warmup": True,
            "sleep_on_idle": True,  # else its loop takes half a core from the ranks while they train
            "log_level": "warning",
        }
        if self.quantization_config is not None:
            arguments |= {"json_model_override_args": {"quantization_config": self.quantization_config}}
        arguments |= (
            {"tokenizer_path": self._tokenizer_folder}
            if self._tokenizer_folder
            else {"skip_tokenizer_init": True}
        )
        if self.device.type == "cpu":
            arguments |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
        else:
            # What sleep() gives back. Weights without a copy would be lost, and with them the base of
            # published changes.
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
            arguments |= {"mem_fraction_static": self.config.server.gpu_memory_fraction}  # of what is free
        return [
            *host_command(python, "megagrpo.host.sglang.server"),
            "--end-with-parent",
            *(["--offline"] if self.config.server.offline else []),
            *command_line_arguments(arguments | self.config.server.options),
        ]

    def server_environment(self) -> Mapping[str, str]:
        environment = {
            "PYTHONPATH": str(HOST_PATH),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the reserved tokens
            # Under torchrun the server would look for its own process group's store at the trainer's.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if self.device.type == "cpu":
            environment |= thread_environment(
                self.config.server.tensor_parallel * self.config.server.num_replicas
            )
            environment |= {
                "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a small model's whole rollout
                "SGLANG_CPU_OMP_THREADS_BIND": cores_by_rank(
                    sorted(os.sched_getaffinity(0)), self.config.server.tensor_parallel
                ),
            }
        else:
            environment |= device_environment(
                self.device.index or 0,
                self.config.server.tensor_parallel,
                os.environ.get("CUDA_VISIBLE_DEVICES"),
            )
        return environment

    def generate_call(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, indices: range
    ) -> Call:
        fields = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted(self.end_token_ids | set(sampling.stop_token_ids)),
        }
        # else completions are cut here, which costs the server tokens
        if sampling.stop and self._tokenizer_folder:
            fields |= {"stop": list(sampling.stop), "no_stop_trim": True}
        keys = (
            row_keys(sampling.seed, sampling.step, [prompt.id] * len(indices), indices)
            .view(np.int64)
            .tolist()
        )
        greedy = sampling.temperature == 0  # the server takes a greedy request by its having no seed
        body = {
            "rid": _request_ids(request_id, len(indices)),
            "input_ids": [list(prompt.token_ids)] * len(indices),
            "sampling_params": [fields if greedy else fields | {"sampling_seed": key} for key in keys],
            "return_logprob": True,
        }
        if self._routed_shape:
            body["return_routed_experts"] = True
        return "/generate", body

    def abort_calls(self, requests: Mapping[str, int]) -> list[Call]:
        return [
            ("/abort_request", {"rid": rid})
            for request_id, count in requests.items()
            for rid in _request_ids(request_id, count)
        ]

    def read_samples(self, answer: Any) -> list[Sample]:
        return [read_sample(sample, self._routed_shape) for sample in answer]

    def pause(self, abort: bool) -> None:
        self.client.call("/pause_generation", {"mode": "retract"})
        if abort:
            self.client.call("/abort_request", {"abort_all": True})

    def send_group(self, address: GroupAddress) -> None:
        self.client.call("/init_weights_update_group", asdict(address))

    def send_bucket(self, manifest: BucketManifest) -> list[Ack]:
        # Open already for all buckets but the first, and where a trainer ended in the middle.
        self._call_session("/begin_weight_update", "session is already open")
        if manifest.transport == "group":
            body = receive_body(manifest.to_json(), manifest.location["group"])
            return read_reply(self.client.call("/update_weights_from_distributed", body)["message"])
        return self._instruct(load_body(manifest.to_json()))

    def commit_weights(self, version: int) -> None:
        self._instruct(commit_body(version))
        self._call_session("/end_weight_update")
        self._continue()

    def resume(self, version: int) -> None:
        # an instruction to a server that isn't paused waits for the end of all its requests
        self.pause(abort=False)
        self._instruct(serve_body(version))
        self._continue()

    def describe_parameters(self) -> list[dict[str, ParameterDescription]]:
        return self._instruct(describe_body())

    def parameter_checksums(self) -> list[dict[str, str]]:
        with self._connection.noting_loss():
            return self._instruct(checksums_body())

    def set_asleep(self, asleep: bool) -> None:
        self.client.call("/release_memory_occupation" if asleep else "/resume_memory_occupation", {})

    # ---- details

    @property
    def _routed_shape(self) -> tuple[int, int] | None:
        """(layers, experts per token) where the server was told to return routed experts."""
        if not self.config.server.options.get("enable_return_routed_experts"):
            return None
        return self._hf.num_hidden_layers, self._hf.num_experts_per_tok

    def prepare(self, prompts: Sequence[Prompt], num_completions: int) -> None:
        """Have the server compute the prompts once; the completions of each then share its keys and values.

        Requests that come together are computed together, so none of them would find another's prompt in the
        cache.
        """
        long = [list(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > _SHORT_PROMPT_TOKENS]
        if num_completions > 1:
            self.client.call_all(
                [
                    ("/generate", {"input_ids": token_ids, "sampling_params": {"max_new_tokens": 0}})
                    for token_ids in long
                ],
                on_answer=lambda number, answer: None,
                max_pending=self.config.max_batch_completions,
                is_aborted=lambda: self._aborted,
                abort_calls=[],
            )

    def _kv_cache_tokens(self, context: int) -> int | None:
        """Return the tokens that the key/value cache has room for: no more than can be in use; None leaves
        it to the server.
        """
        if self.config.server.kv_cache_bytes is None and self.device.type != "cpu":
            return None
        heads = self._hf.num_key_value_heads or self._hf.num_attention_heads
        head_size = (
            getattr(self._hf, "head_dim", None) or self._hf.hidden_size // self._hf.num_attention_heads
        )
        heads_of_rank = -(-heads // self.config.server.tensor_parallel)
        token_bytes = 2 * self._hf.num_hidden_layers * heads_of_rank * head_size * self.dtype.itemsize
        budget = (self.config.server.kv_cache_bytes or _CPU_KV_CACHE_BYTES) // token_bytes
        return max(context, min(budget, context * self.config.max_batch_completions))

    def _continue(self) -> None:
        self.client.call("/continue_generation", {"torch_empty_cache": self.device.type != "cpu"})

    def _call_session(self, path: str, *tolerated: str) -> None:
        """Open or close an update session of the server. SGLang before 0.5.21 has none, and answers 404."""
        try:
            self.client.call(path, {})
        except EngineError as refusal:
            if not any(answer in str(refusal) for answer in ("answered 404", *tolerated)):
                raise

    def _instruct(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Have every engine rank follow an instruction; return their answers by rank."""
        return read_reply(self.client.call("/update_weights_from_tensor", body)["message"])


def cores_by_rank(cores: Sequence[int], num_ranks: int) -> str:
    """Return which cores each engine rank gets, as SGLang writes it; without it a CPU must have a NUMA
    node for each rank.
    """
    share = max(1, len(cores) // num_ranks)
    groups = [
        [cores[(rank * share + place) % len(cores)] for place in range(share)] for rank in range(num_ranks)
    ]
    return "|".join(",".join(map(str, group)) for group in groups)


def _request_ids(request_id: str, count: int) -> list[str]:
    # the dot at the end: the server ends what begins with an id
    return [f"{request_id}.{place}." for place in range(count)]
