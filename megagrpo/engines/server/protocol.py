"""How this process talks to one kind of server: asks it for completions, pauses it, gives it weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from pydantic import TypeAdapter

from megagrpo.engines.base import EngineError
from megagrpo.engines.bucket_engine import Ack
from megagrpo.engines.server.answers import Answer, ParameterDescription, Sample, read_answer
from megagrpo.engines.server.engine_server import EngineServer
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.served_model import ServedModel
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.bucket_manifest import BucketManifest
from megagrpo.wire.transfer_group import GroupAddress

PostRequest = tuple[str, Any]
"""(path, body) of one POST."""


class Part(Enum):
    """The part of a sleeping server's memory that is allocated again."""

    ALL = "all"
    WEIGHTS = "weights"
    CACHE = "cache"  # keys and values, and all else that is not weights


# An id, its log-prob and its text take about 200 bytes of JSON.
_TOKEN_BYTES = 1024


class ServerProtocol(ABC):
    """The calls to a server, in the form that its kind has for them.

    Attributes:
        engine_ranks: processes that hold a part of the model.
    """

    def __init__(self, model: ServedModel, server: EngineServer):
        self.model, self.server = model, server
        self.engine_ranks = model.config.server.tensor_parallel

    @property
    def transports(self) -> tuple[str, ...]:
        """Ways in which a bucket can reach the server."""
        return ("shared_memory", "group", "disk", "ipc")

    @abstractmethod
    def generate_call(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, indices: range
    ) -> PostRequest:
        """Return the request for completions `indices` of a prompt. The server tells a probe by its
        `request_id`.
        """

    def token_bytes(self) -> int:
        """Return what the answer to a request takes for each token, at most."""
        return _TOKEN_BYTES

    def prepare(  # noqa: B027 (most need nothing)
        self, prompts: Sequence[Prompt], num_completions: int, is_aborted: Callable[[], bool]
    ) -> None:
        """Do what helps the server before it gets the requests for `num_completions` completions of each
        prompt; end early once `is_aborted`.
        """

    @abstractmethod
    def abort_calls(self, requests: Mapping[str, int]) -> list[Call]:
        """Return the calls that end the given requests (their ids, with the number of their completions)
        early.
        """

    @abstractmethod
    def read_samples(self, answer: Any) -> list[Sample]:
        """Return the completions in an answer to `generate_call`, by index. Raises EngineError if it is no
        such answer.
        """

    @abstractmethod
    def pause(self, abort: bool) -> None:
        """Stop decoding; running requests wait, or end now if `abort`. Pausing again is no
        error.
        """

    @abstractmethod
    def join_group(self, address: GroupAddress) -> None:
        """Have every engine rank join a group with the trainer's ranks, and leave the one before. Raises
        EngineError if one can't.
        """

    @abstractmethod
    def send_bucket(self, manifest: BucketManifest) -> list[Ack]:
        """Have every engine rank verify and load a bucket; return the acks by rank. Raises EngineError
        with what a rank refused.
        """

    @abstractmethod
    def commit_weights(self, version: int) -> None:
        """Make what was loaded `version`: drop all that was computed from older weights. From then on
        probes are answered, nothing else.
        """

    @abstractmethod
    def resume(self, version: int) -> None:
        """Decode all requests on, under `version`."""

    @abstractmethod
    def describe_parameters(self) -> list[dict[str, ParameterDescription]]:
        """Return what every engine rank says of its own parameters, by name: the tensors of layout
        `sharded`.
        """

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights survive sleep, in host memory."""
        return self.model.config.server.sleep_keeps_weights

    @abstractmethod
    def sleep(self) -> None:
        """Free the accelerator's memory."""

    @abstractmethod
    def wake(self, part: Part) -> None:
        """Allocate the memory of `part`, which sleeps, again."""

    def _read(self, kind: TypeAdapter[Answer], answer: Any) -> Answer:
        try:
            return read_answer(kind, answer)
        except EngineError as error:
            raise EngineError(f"{self.server.address}: {error}") from None

    def parameter_checksums(self) -> list[dict[str, str]]:
        """Return the checksums of every engine rank's own parameters. Raises EngineError if a server of
        this kind can't tell.
        """
        raise EngineError(f"{self.server.address} does not tell checksums of its parameters")
