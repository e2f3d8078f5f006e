"""How this process talks to an SGLang server, which draws with our counters and reads weights by manifest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import Ack
from megagrpo.engines.server.answers import (
    ACKS,
    CHECKSUMS,
    PARAMETERS,
    ParameterDescription,
    Sample,
    StrictModel,
    number_own_weights,
)
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.protocol import Part, PostRequest, ServerProtocol
from megagrpo.engines.server.sglang_answers import read_samples
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.bucket_manifest import BucketManifest
from megagrpo.wire.counter_sampling import row_keys
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

_WAKE_TAGS: Mapping[Part, dict[str, list[str]]] = {
    Part.ALL: {},
    Part.WEIGHTS: {"tags": ["weights"]},
    Part.CACHE: {"tags": ["kv_cache", "cuda_graph"]},
}
_SHORT_PROMPT_TOKENS = 32  # computed again for every completion: that takes less than a round trip more


class _Reply(StrictModel):
    message: str


_REPLY = TypeAdapter(_Reply)


class SglangProtocol(ServerProtocol):
    """SGLang: token ids in; token ids, log-probs of the sampled distribution and weight versions
    out.

    The server's sampler is ours (host/sglang/sampler.py), so a completion has the tokens that the embedded
    engine would draw, as far as their logits agree. While weights are written its requests are retracted:
    they keep their tokens, lose their keys and values, and go on under the new weights, which
    `weight_versions` tells token by token.
    """

    def generate_call(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, indices: range
    ) -> PostRequest:
        fields = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted(self.model.end_token_ids | set(sampling.stop_token_ids)),
        }
        # else completions are cut here, which costs the server tokens
        if sampling.stop and self.model.tokenizer_folder:
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
            Call("/abort_request", {"rid": rid})
            for request_id, count in requests.items()
            for rid in _request_ids(request_id, count)
        ]

    def token_bytes(self) -> int:
        # routed experts are four bytes each, in base64
        layers, experts = self._routed_shape or (0, 0)
        return super().token_bytes() + 6 * layers * experts

    def read_samples(self, answer: Any) -> list[Sample]:
        if self.model.load_weights and isinstance(answer, list):
            number_own_weights([each.get("meta_info") for each in answer if isinstance(each, dict)])
        return read_samples(answer, self._routed_shape)

    def pause(self, abort: bool) -> None:
        self.server.call("/pause_generation", {"mode": "retract"}, is_repeatable=True)
        if abort:
            self.server.call("/abort_request", {"abort_all": True}, is_repeatable=True)

    def join_group(self, address: GroupAddress) -> None:
        self.server.call("/init_weights_update_group", asdict(address))

    def send_bucket(self, manifest: BucketManifest) -> list[Ack]:
        # Open already for all buckets but the first, and where a trainer ended in the middle.
        self._call_session("/begin_weight_update", "session is already open")
        if manifest.transport == "group":
            body = receive_body(manifest.to_json(), manifest.location["group"])
            return self._read(
                ACKS, self._read_reply(self.server.call("/update_weights_from_distributed", body))
            )
        return self._read(ACKS, self._instruct(load_body(manifest.to_json())))

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
        return self._read(PARAMETERS, self._instruct(describe_body()))

    def parameter_checksums(self) -> list[dict[str, str]]:
        return self._read(CHECKSUMS, self._instruct(checksums_body()))

    def sleep(self) -> None:
        self.server.call("/release_memory_occupation", {})

    def wake(self, part: Part) -> None:
        self.server.call("/resume_memory_occupation", _WAKE_TAGS[part])

    # ---- details

    @property
    def _routed_shape(self) -> tuple[int, int] | None:
        """(layers, experts per token) where the server returns routed experts."""
        if not self.model.config.server.options.get("enable_return_routed_experts"):
            return None
        return self.model.hf.num_hidden_layers, self.model.hf.num_experts_per_tok

    def prepare(
        self, prompts: Sequence[Prompt], num_completions: int, is_aborted: Callable[[], bool]
    ) -> None:
        """Have the server compute the prompts once; the completions of each then share its keys and values.

        Requests that come together are computed together, so none of them would find another's prompt in the
        cache.
        """
        long = [list(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > _SHORT_PROMPT_TOKENS]
        if num_completions > 1:
            self.server.call_all(
                [
                    Call("/generate", {"input_ids": token_ids, "sampling_params": {"max_new_tokens": 0}})
                    for token_ids in long
                ],
                on_answer=lambda number, answer: None,
                max_pending=self.model.config.max_batch_completions,
                is_aborted=is_aborted,
                abort_calls=[],
            )

    def _continue(self) -> None:
        self.server.call("/continue_generation", {"torch_empty_cache": self.model.device.type != "cpu"})

    def _call_session(self, path: str, *tolerated: str) -> None:
        """Open or close an update session of the server. SGLang before 0.5.21 has none, and answers 404."""
        try:
            self.server.call(path, {})
        except EngineError as refusal:
            if not any(answer in str(refusal) for answer in ("answered 404", *tolerated)):
                raise

    def _instruct(self, body: dict[str, Any]) -> Any:
        """Have every engine rank follow an instruction; return their answers by rank, unchecked."""
        return self._read_reply(self.server.call("/update_weights_from_tensor", body))

    def _read_reply(self, answer: Any) -> Any:
        message = self._read(_REPLY, answer).message
        try:
            return read_reply(message)
        except (ValueError, RecursionError):
            raise EngineError(f"{self.server.address}: answered {message[:80]!r}, not JSON") from None


def _request_ids(request_id: str, count: int) -> list[str]:
    # the dot at the end: the server ends what begins with an id
    return [f"{request_id}.{place}." for place in range(count)]
