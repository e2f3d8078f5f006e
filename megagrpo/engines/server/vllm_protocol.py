"""How this process talks to vLLM's API server."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import Ack
from megagrpo.engines.completion_rules import prompt_seed
from megagrpo.engines.server.answers import (
    ACKS,
    CHECKSUMS,
    COMMIT_ACKS,
    PARAMETERS,
    ParameterDescription,
    Sample,
    StrictModel,
    Text,
    TokenIds,
    VersionSpan,
    number_own_weights,
    read_answer,
)
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.protocol import Part, PostRequest, ServerProtocol
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.bucket_manifest import BucketManifest
from megagrpo.wire.transfer_group import GroupAddress

_WAKE_TAGS = {Part.ALL: "", Part.WEIGHTS: "?tags=weights", Part.CACHE: "?tags=kv_cache"}
_REQUEST_PREFIX = "generate-tokens-"  # the server's own, before the request ids of its generate route


class _Token(StrictModel):
    logprob: float


class _Logprobs(StrictModel):
    content: list[_Token] | None


class _Choice(StrictModel):
    index: int
    token_ids: TokenIds | None  # none: it ended before its first token
    logprobs: _Logprobs | None
    finish_reason: Text
    weight_versions: list[VersionSpan] | None


class _Answer(StrictModel):
    choices: list[_Choice]


class _WorkerAnswers(StrictModel):
    results: list[dict[str, Any]]


class _Reset(StrictModel):
    success: bool


class _Sleep(StrictModel):
    status: Text


_ANSWER, _WORKER_ANSWERS = TypeAdapter(_Answer), TypeAdapter(_WorkerAnswers)
_RESET, _SLEEP = TypeAdapter(_Reset), TypeAdapter(_Sleep)


class VllmProtocol(ServerProtocol):
    """vLLM: token ids in; token ids, log-probs at the sampling temperature and weight versions out.

    The samples of a prompt come from one request. vLLM gives sample i of a request the seed s + i and draws
    from a generator of its own for each, so a completion is a function of (seed, step, prompt, index,
    weights) as far as its logits do not depend on the batch.
    """

    _in_transfer = False  # between /start_weight_update and /finish_weight_update

    @property
    def transports(self) -> tuple[str, ...]:
        """CUDA IPC where the server computes on the GPUs of the ranks."""
        on_gpus = self.model.device.type == "cuda"
        return tuple(name for name in super().transports if name != "ipc" or on_gpus)

    def generate_call(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, indices: range
    ) -> PostRequest:
        fields = {
            "n": len(indices),
            "seed": prompt_seed(sampling, prompt) + indices.start,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0,
            "ignore_eos": True,  # the end tokens are all in stop_token_ids
            "stop_token_ids": sorted(self.model.end_token_ids | set(sampling.stop_token_ids)),
            "detokenize": False,
        }
        # else completions are cut here, which costs the server tokens
        if sampling.stop and self.model.tokenizer_folder is not None:
            fields |= {"stop": list(sampling.stop), "detokenize": True, "skip_special_tokens": False}
        return "/inference/v1/generate", {
            "request_id": request_id,
            "token_ids": list(prompt.token_ids),
            "sampling_params": fields,
        }

    def abort_calls(self, requests: Mapping[str, int]) -> list[Call]:
        return [
            Call(
                "/abort_requests", {"request_ids": [_REQUEST_PREFIX + request_id for request_id in requests]}
            )
        ]

    def read_samples(self, answer: Any) -> list[Sample]:
        if self.model.load_weights and isinstance(answer, dict):
            number_own_weights(answer.get("choices"))
        choices = sorted(read_answer(_ANSWER, answer).choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(choices))):
            raise EngineError(f"completions {[choice.index for choice in choices]} came")
        return [self._read_choice(choice) for choice in choices]

    def _read_choice(self, choice: _Choice) -> Sample:
        token_ids = choice.token_ids or []
        logprobs = [token.logprob for token in choice.logprobs.content or ()] if choice.logprobs else []
        spans = choice.weight_versions
        if spans is None and self.model.load_weights:  # the weights that it was started with have no label
            spans = [VersionSpan(version=0, start=0, end=len(token_ids))]
        return Sample(token_ids, logprobs, choice.finish_reason, spans or ())

    def pause(self, abort: bool) -> None:
        self.server.call(f"/pause?mode={'abort' if abort else 'keep'}", is_repeatable=True)

    def join_group(self, address: GroupAddress) -> None:
        # the last one ended in the middle
        if any(answer.get("is_open") for answer in self._ask_workers("describe_transfer")):
            self.server.call("/finish_weight_update", {})
        self._in_transfer = False
        self.server.call("/init_weight_transfer_engine", {"init_info": asdict(address)})
        self._call_workers("describe_transfer")

    def send_bucket(self, manifest: BucketManifest) -> list[Ack]:
        if manifest.transport != "group":
            return self._read(ACKS, self._call_workers("receive_bucket", manifest.to_json()))
        if not self._in_transfer:
            self.server.call("/start_weight_update")
            self._in_transfer = True
        self.server.call("/update_weights", {"update_info": {"manifest": manifest.to_json()}})
        return self._read(ACKS, self._call_workers("load_received"))

    def commit_weights(self, version: int) -> None:
        if self._in_transfer:
            self.server.call("/finish_weight_update", {})
            self._in_transfer = False
        acks = self._read(COMMIT_ACKS, self._call_workers("commit_weights", str(version)))
        if any(ack.version != version for ack in acks) or len(acks) != self.engine_ranks:
            raise EngineError(f"weight version {version}: the engine's ranks committed {acks}")
        # Running requests lose their keys and values too: the new weights recompute them.
        reset = self.server.call("/reset_prefix_cache?reset_running_requests=true", is_repeatable=True)
        if not self._read(_RESET, reset).success:
            raise EngineError(f"weight version {version}: the engine kept keys and values of older weights")
        self.server.call("/update_weight_version", {"new_version": str(version)}, is_repeatable=True)

    def resume(self, version: int) -> None:
        self.server.call("/resume", is_repeatable=True)

    def describe_parameters(self) -> list[dict[str, ParameterDescription]]:
        answers = self._call_workers("describe_parameters")
        return self._read(PARAMETERS, [answer.get("parameters") for answer in answers])

    def parameter_checksums(self) -> list[dict[str, str]]:
        answers = self._call_workers("checksum_parameters")
        return self._read(CHECKSUMS, [answer.get("checksums") for answer in answers])

    def sleep(self) -> None:
        self._move(f"/sleep?level={1 if self.keeps_weights else 2}", "sleeping")

    def wake(self, part: Part) -> None:
        # awake are servers of which no part sleeps
        self._move(f"/wake_up{_WAKE_TAGS[part]}", "sleeping" if part is Part.WEIGHTS else "awake")
        if part is Part.CACHE:
            self.pause(abort=False)  # one that is whole again has begun to schedule, and an update is open

    def _move(self, path: str, wanted: str) -> None:
        told = self._read(_SLEEP, self.server.call(path, is_repeatable=True)).status
        if told != wanted:
            raise EngineError(f"{self.server.address}: after {path} the engine says that it is {told}")

    def _call_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Call a method of the weight receiver on every worker; the answers by engine rank."""
        answers = self._ask_workers(method, *arguments)
        if refused := [answer["error"] for answer in answers if "error" in answer]:
            raise EngineError(refused[0])
        return sorted(answers, key=lambda answer: answer.get("rank", -1))

    def _ask_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        answer = self.server.call("/collective_rpc", {"method": method, "args": list(arguments)})
        return self._read(_WORKER_ANSWERS, answer).results
