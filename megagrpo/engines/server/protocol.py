"""What an engine that is a server has to say of its kind: how it is started, asked, paused and given
weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from megagrpo.engines.base import EngineError
from megagrpo.engines.completions import Sample
from megagrpo.engines.server.http_client import Call
from megagrpo.engines.server.python_environment import EnginePackage
from megagrpo.engines.server.weights import Ack
from megagrpo.types import Prompt, SamplingParams
from megagrpo.wire.manifest import BucketManifest
from megagrpo.wire.transfer_group import GroupAddress


class ParameterDescription(TypedDict):
    """One parameter of an engine rank."""

    dtype: str  # a torch dtype without its prefix
    shape: list[int]


class ServerProtocol(ABC):
    """The part of a RemoteEngine that differs from kind to kind.

    Attributes:
        package: what has to be installed.
        health_path: answers 200 to a GET once the server serves.
        transports: ways in which a bucket can reach the engine.
    """

    package: ClassVar[EnginePackage]
    health_path: ClassVar[str] = "/health"
    transports: tuple[str, ...] = ("shared_memory", "group", "disk", "ipc")

    @abstractmethod
    def server_command(self, python: str, port: int) -> list[str]:
        """Return the command that starts the server, which listens on 127.0.0.1 alone."""

    @abstractmethod
    def server_environment(self) -> Mapping[str, str]:
        """Return what the server's environment has beside this process's."""

    @abstractmethod
    def generate_call(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, indices: range
    ) -> Call:
        """Return the request for completions `indices` of a prompt. The server tells a probe by its
        `request_id`.
        """

    def prepare(self, prompts: Sequence[Prompt], num_completions: int) -> None:  # noqa: B027 (most need nothing)
        """Do what helps the server before it gets the requests for `num_completions` completions of each
        prompt.
        """

    @abstractmethod
    def abort_calls(self, requests: Mapping[str, int]) -> list[Call]:
        """Return the calls that end the given requests (their ids, with the number of their completions)
        early.
        """

    @abstractmethod
    def read_samples(self, answer: Any) -> list[Sample]:
        """Return the completions in an answer to `generate_call`, by index."""

    @abstractmethod
    def pause(self, abort: bool) -> None:
        """Stop decoding; requests that are on their way wait, or end now if `abort`. Pausing again is no
        error.
        """

    @abstractmethod
    def send_group(self, address: GroupAddress) -> None:
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

    @abstractmethod
    def set_asleep(self, asleep: bool) -> None:
        """Give the accelerator's memory back, or take it again; the weights survive."""

    def parameter_checksums(self) -> list[dict[str, str]]:
        """Return the checksums of every engine rank's own parameters: two ways of loading can be compared bit
        for bit.

        Raises:
            EngineError: an engine of this kind can't tell.
        """
        raise EngineError(f"engine {self.package.name} does not tell checksums of its parameters")
