"""Engines that are servers: one rank's view of a server, whose protocol is that of its kind."""

from collections.abc import Callable, Sequence

from megagrpo.engines.base import EngineError, EngineHealth, OnGroup
from megagrpo.engines.bucket_engine import Ack, BucketEngine
from megagrpo.engines.lifecycle import Action, EngineLifecycle
from megagrpo.engines.server.answers import ParameterDescription
from megagrpo.engines.server.bucket_update import BucketUpdate
from megagrpo.engines.server.engine_server import EngineServer
from megagrpo.engines.server.protocol import Part, ServerProtocol
from megagrpo.engines.server.requests import CompletionRequests
from megagrpo.errors import UserError
from megagrpo.models.quantization import find_mismatch
from megagrpo.types import Completion, Prompt, SamplingParams
from megagrpo.wire.bucket_manifest import BucketManifest
from megagrpo.wire.probe_requests import probe_request_id
from megagrpo.wire.transfer_group import GroupAddress


class ServerEngine(BucketEngine):
    """A server with weights, as its owner or a follower sees it (BucketEngine).

    The server is paused from an update's first bucket until the new version serves. Running requests wait,
    then continue under the new version, which their completions' `weight_versions` say token by token; if
    the update fails, they are aborted.

    A server that dropped its weights to sleep takes memory for them when it wakes, and memory for keys and
    values once a whole version has come, so that neither is held beside a trainer that still holds its own.

    A server that dies or falls silent makes the engine "dead": it refuses everything until `restart()`.

    Attributes:
        protocol: talks to the server in the form of its kind.
        server: the server itself.
    """

    def __init__(self, protocol: ServerProtocol, server: EngineServer, is_owner: bool = True):
        """Take a server that serves, and the protocol that talks to it."""
        self.protocol, self.server = protocol, server
        self.is_owner, self.engine_ranks, self.dtype = is_owner, protocol.engine_ranks, protocol.model.dtype
        self.transfer_group: str | None = None
        self._is_aborted = self._is_cache_asleep = False
        self._lifecycle = EngineLifecycle(find_loss=lambda: server.loss)
        self._update = self._new_update()
        if self.protocol.model.load_weights:
            self._lifecycle.serve_from_start(is_any_version=server.pid is None)

    @property
    def address(self) -> str:
        return self.server.url

    @property
    def pid(self) -> int | None:
        """Process id of the server, if it was started here."""
        return self.server.pid

    @property
    def transports(self) -> tuple[str, ...]:
        return self.protocol.transports

    @property
    def opened_version(self) -> int | None:
        """The version that the open update (or the last one) is to; None: there was none."""
        return self._lifecycle.opened

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.health().weight_version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        completion_indices: Sequence[int],
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        with self._lifecycle.generating():
            self._is_aborted = False
            return self._requests(self._lifecycle.version or 0).generate(
                prompts, sampling, completion_indices, on_group, lambda: self._is_aborted
            )

    def check_model(self) -> None:
        """Compare the server's model with `engine.server.quantization`. Raises UserError if they differ."""
        quantization = self.protocol.model.config.server.quantization
        if mismatch := find_mismatch(quantization, self.describe_parameters()):
            raise UserError(
                f"engine.server.quantization: {quantization}: {mismatch} at {self.server.address}"
            )

    def describe_parameters(self) -> list[dict[str, ParameterDescription]]:
        """Return what every engine rank says of its own parameters, by name."""
        return self.protocol.describe_parameters()

    def parameter_checksums(self) -> list[dict[str, str]]:
        return self.protocol.parameter_checksums()

    def begin_update(self, version: int) -> None:
        self._update.begin(version)

    def join_group(self, address: GroupAddress) -> None:
        self._lifecycle.require(Action.JOIN)
        self.transfer_group = None
        self.protocol.join_group(address)
        self.transfer_group = address.group_name

    def receive(self, manifest: BucketManifest) -> list[Ack]:
        return self._update.receive(manifest)

    def complete_update(self, version: int) -> None:
        self._lifecycle.require_completable(version)
        self._wake_cache()
        self._update.complete(version)

    def sample_probe(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        self._lifecycle.require(Action.PROBE)
        requests = self._requests(self._lifecycle.opened or 0, probe_request_id)
        ((completion,),) = requests.generate([prompt], sampling, [0])
        return completion

    def serve_update(self, version: int) -> None:
        self._update.serve(version)

    def abort_update(self) -> None:
        if self._update.is_past_return:
            self._is_aborted = (
                True  # before the server is paused for good: what is sent then would wait there
            )
        self._update.abort()

    def sleep(self) -> None:
        self._lifecycle.require(Action.SLEEP)
        if self.is_owner and not self._lifecycle.is_asleep:
            self._wake_cache()  # servers fall asleep whole
            self.protocol.sleep()
        self._lifecycle.sleep(self.protocol.keeps_weights)

    def wake(self) -> None:
        self._lifecycle.require(Action.WAKE)
        if self.is_owner:
            self.protocol.wake(Part.ALL if self.protocol.keeps_weights else Part.WEIGHTS)
            self._is_cache_asleep = not self.protocol.keeps_weights
        self._lifecycle.wake()

    def _wake_cache(self) -> None:
        if self._is_cache_asleep:
            self.protocol.wake(Part.CACHE)
            self._is_cache_asleep = False

    def abort(self) -> None:
        self._is_aborted = True

    def health(self) -> EngineHealth:
        return self._lifecycle.health()

    def close(self) -> None:
        if self._lifecycle.close():
            self.server.close()

    def restart(self, address: str | None = None) -> None:
        """Restart a dead server, or reconnect to one that was not started here; it is empty then, and serves
        nothing until a whole update is committed.

        A follower only takes note of it.

        Args:
            address: where the server is now; a follower's to be told.

        Raises:
            EngineError: the engine is closed, its server was not started here and does not answer, or it was
                lost more than `engine.server.max_restarts` times.
            UserError: it does not start.
        """
        if self._lifecycle.is_closed:
            raise EngineError("the rollout engine is closed")
        self.forget_weights()  # before the server counts as recovered: another thread may ask
        self.transfer_group, self._is_cache_asleep = None, False
        if self.is_owner:
            self.server.restart()
        else:
            self.server.find(address)

    def forget_weights(self) -> None:
        """Take the server for empty, whatever it holds: it generates after the next whole update, which
        may be to any version.
        """
        self._lifecycle.forget()
        self._update = self._new_update()

    def _requests(self, version: int, name_request: Callable[[str], str] = str) -> CompletionRequests:
        return CompletionRequests(self.protocol, self.server, self._lifecycle, version, name_request)

    def _new_update(self) -> BucketUpdate:
        return BucketUpdate(self.protocol.model.tensor_shapes, self.protocol, self._lifecycle, self.is_owner)
