"""Engines that live in a process of their own: one server, reached over HTTP, started as a child or given
by its address.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from megagrpo.config.engine import ServerEngineConfig
from megagrpo.engines.base import Engine, EngineError, EngineHealth, OnGroup
from megagrpo.engines.hf_model import end_token_ids, load_from_folder
from megagrpo.engines.server.connection import ServerConnection
from megagrpo.engines.server.http_client import EngineClient
from megagrpo.engines.server.protocol import ServerProtocol
from megagrpo.engines.server.requests import request_completions
from megagrpo.engines.server.weights import Ack, ServerWeights
from megagrpo.errors import UserError
from megagrpo.models.family import checkpoint_tensors
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.quantization import find_mismatch, quantization_config, quantized_shapes
from megagrpo.types import Completion, Prompt, SamplingParams
from megagrpo.wire.manifest import BucketManifest
from megagrpo.wire.probe_requests import probe_request_id
from megagrpo.wire.transfer_group import GroupAddress


class RemoteEngine(ServerProtocol, Engine):
    """A server with weights, and this process's view of it.

    One process owns a server: it starts it (unless an address is given), publishes to it and closes it.
        Others follow: they generate,
    and go through the calls of an update without sending anything, so that they know what is served; the
    caller sees to it that a follower generates only after the owner's commit.

    The server is paused from an update's first bucket until the new version serves. Requests that are on
    their way wait, and go on under the new version, which their completions' `weight_versions` tell token by
    token; if the update fails, they are ended.

    A server that dies or falls silent makes the engine "dead": it refuses everything until `restart()`.

    Attributes:
        engine_ranks: processes that hold a part of the model, each of which acknowledges a bucket.
        is_owner: whether this process publishes to the server.
        transfer_group: the name of the process group that the server's ranks have joined for updates; None:
            none that is known.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: ServerEngineConfig,
        tokenizer: Any = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        load_weights: bool = False,
        *,
        address: str | None = None,
        is_owner: bool = True,
        log_file: str | Path | None = None,
    ):
        """Start a server for `model_folder` (an HF folder) and wait for it, or turn to the one at `address`.

        Args:
            config: the `engine:` section.
            tokenizer: the folder's own if None; decodes completions and searches stop strings.
            device: what the server computes on, as its type says.
            load_weights: the server reads the folder's weights and serves them as version 0; only where it is
                started here.
            address: None: the one in `config.server.addresses`, or a server is started.
            log_file: of a server that is started; None: a temporary file.

        Raises:
            UserError: the engine is not installed, its server does not start or is not there, or the folder
                can't be read.
        """
        self.config, self.is_owner, self.load_weights = config, is_owner, load_weights
        self.model_folder, self.device, self.dtype = Path(model_folder), torch.device(device), dtype
        self.engine_ranks = config.server.tensor_parallel
        self._hf = load_from_folder(AutoConfig, model_folder)
        self.tokenizer = tokenizer if tokenizer is not None else load_from_folder(AutoTokenizer, model_folder)
        self.end_token_ids = end_token_ids(model_folder, self._hf, self.tokenizer)
        tensors = checkpoint_tensors(read_hf_config(model_folder))
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        self.quantization_config = None  # of the server's model
        if config.server.quantization != "none":
            self.quantization_config = quantization_config(tensors)
            shapes = quantized_shapes(tensors)
        self._tensor_shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._closed = self._asleep = self._aborted = False
        self.transfer_group: str | None = None
        address = address or _only(config.server.addresses)
        if address and load_weights:
            raise UserError(
                f"engine.server.addresses: {address}: serves weights of its own; they must be published to it"
            )
        self._connection = ServerConnection(self, address, log_file)
        self._weights = ServerWeights(self._tensor_shapes, self, is_owner)
        if load_weights:
            self._weights.mark_complete(0)

    # ---- the contract

    @property
    def address(self) -> str:
        """HTTP address of the server."""
        return self.client.address

    @property
    def pid(self) -> int | None:
        """Process id of the server, if it was started here."""
        return self._connection.pid

    @property
    def client(self) -> EngineClient:
        """Calls the server."""
        return self._connection.client

    @property
    def context_tokens(self) -> int:
        """Largest number of tokens of a prompt with its completion."""
        return self.config.server.max_model_len or self._hf.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows."""
        return self._hf.vocab_size

    @property
    def weight_version(self) -> int | None:
        return None if self._state() == "dead" else self._weights.version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        completion_indices: Sequence[int],
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        self._require("serving")
        self._aborted = False
        with self._connection.noting_loss():
            return request_completions(
                self, prompts, sampling, completion_indices, on_group, lambda: self._aborted
            )

    def check_model(self) -> None:
        """Compare the server's model with `engine.server.quantization`. UserError where they differ."""
        if mismatch := find_mismatch(self.config.server.quantization, self.describe_parameters()):
            raise UserError(
                f"engine.server.quantization: {self.config.server.quantization}: {mismatch} at {self.address}"
            )

    def sample_probe(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Sample completion 0 of a prompt under a version that is complete and does not serve yet.

        Raises:
            EngineError: no update is complete.
        """
        self._require("verifying")
        with self._connection.noting_loss():
            ((completion,),) = request_completions(
                self, [prompt], sampling, [0], name_request=probe_request_id
            )
        return completion

    def begin_update(self, version: int) -> None:
        self._require("empty", "serving", "updating", "stale")
        self._weights.begin(version)

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._require("empty", "serving", "updating", "stale")
        with self._connection.noting_loss():
            self._weights.load(named_tensors)

    def join_group(self, address: GroupAddress) -> None:
        """Have the server's ranks join a process group with the trainer's, through which buckets of transport
        `group` come.

        Raises:
            EngineError: a rank can't, or not all members come in time.
        """
        self._require("empty", "serving", "updating", "stale")
        self.transfer_group = None
        with self._connection.noting_loss():
            self.send_group(address)
        self.transfer_group = address.group_name

    def receive(self, manifest: BucketManifest) -> list[Ack]:
        """Have the server take one bucket of the open update, and return what its ranks acknowledge.

        The first one pauses the server. A follower only notes which tensors its owner sends, and returns
        nothing.

        Raises:
            EngineError: no update to the manifest's version is open; a tensor is unknown, repeated,
                misshapen, not finite, or not what its checksum says (it is named); an acknowledgement is
                missing or differs.
        """
        self._require("empty", "serving", "updating", "stale")
        with self._connection.noting_loss():
            return self._weights.receive(manifest)

    def complete_update(self, version: int) -> None:
        """Close the transaction without serving the version yet: the engine is "verifying".

        It answers `sample_probe` alone, and requests that are on their way wait, until `serve_update` or
        `abort_update`, which leaves it stale. Raises EngineError if tensors are missing (they are named).
        """
        self._require("empty", "serving", "updating", "stale")
        self._weights.check_complete(version)
        if self.is_owner:
            with self._connection.noting_loss():
                self.commit_weights(version)
        self._weights.mark_verifying()

    def serve_update(self, version: int) -> None:
        """Serve a version that is complete. Raises EngineError if none is, or another."""
        self._require("verifying")
        self._weights.check_verifying(version)
        if self.is_owner:
            with self._connection.noting_loss():
                self.resume(version)
        self._weights.mark_complete(version)

    def commit_update(self, version: int) -> None:
        self.complete_update(version)
        self.serve_update(version)

    def abort_update(self) -> None:
        was_open = self._weights.updating
        self._weights.abort()
        if was_open and self.is_owner and self._state() == "stale":
            with self._connection.noting_loss():
                self.pause(abort=True)  # nothing that is on its way may go on under half an update

    def sleep(self) -> None:
        self._require("empty", "serving", "stale", "asleep")
        if self.is_owner and not self._asleep:
            with self._connection.noting_loss():
                self.set_asleep(True)
        self._asleep = True

    def wake(self) -> None:
        self._require("asleep")
        if self.is_owner:
            with self._connection.noting_loss():
                self.set_asleep(False)
        self._asleep = False

    def abort(self) -> None:
        self._aborted = True

    def health(self) -> EngineHealth:
        state = self._state()
        reasons = {
            "empty": "no weights were committed yet",
            "stale": "an update failed half-way",
            "updating": "an update is open",
        }
        reasons |= {"verifying": "the new weights are not verified yet"}
        detail = (self._connection.loss or "") if state == "dead" else reasons.get(state, "")
        return EngineHealth(
            state == "serving", state, None if state == "dead" else self._weights.version, detail
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connection.close()

    def restart(self, address: str | None = None) -> None:
        """Start a dead server anew; it is empty then, and serves nothing until a whole update is committed.

        A follower only takes note of it.

        Args:
            address: where the server is now; a follower's to be told.

        Raises:
            EngineError: the engine is closed, its server was not started here, or it died more than
                `engine.server.max_restarts` times.
            UserError: it does not start.
        """
        if self._closed:
            raise EngineError("the rollout engine is closed")
        self.forget_weights()  # before the server is taken for found: another thread may ask
        self._asleep, self.transfer_group = False, None
        if self.is_owner:
            self._connection.restart()
        else:
            self._connection.find(address)

    def forget_weights(self) -> None:
        """Take the server for empty, whatever it holds: it generates after the next whole update, which
        may be to any version.
        """
        self._weights = ServerWeights(self._tensor_shapes, self, self.is_owner)

    # ---- details

    @property
    def _tokenizer_folder(self) -> str | None:
        """Where the server finds the tokenizer, with which it notices stop strings; None: it was not
        loaded from a folder.
        """
        folder = self.tokenizer.name_or_path
        return folder if folder and Path(folder).is_dir() else None

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if self._connection.loss:
            return "dead"
        if self._asleep:
            return "asleep"
        if self._weights.updating:
            return "verifying" if self._weights.verifying else "updating"
        if self._weights.stale:
            return "stale"
        return "empty" if self._weights.version is None else "serving"


def _only(addresses: Sequence[str]) -> str | None:
    if len(addresses) > 1:
        raise UserError(f"engine.server.addresses: names {len(addresses)} servers, one engine is one of them")
    return addresses[0] if addresses else None
