"""The contract of an engine in processes of its own, which takes weights as buckets. Its tests are
tests/contracts/test_server_contract.py.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from typing_extensions import TypedDict  # pydantic reads the one of typing from Python 3.12 on

from megagrpo.engines.base import Engine, EngineError
from megagrpo.types import Completion, Prompt, SamplingParams
from megagrpo.wire.bucket_manifest import BucketManifest
from megagrpo.wire.transfer_group import GroupAddress


class Ack(TypedDict):
    """An engine rank's acknowledgement of a bucket."""

    rank: int
    version: int
    tensors: dict[str, str]  # name -> checksum
    bytes: int


class BucketEngine(Engine):
    """One rank's view of a replica of the engine.

    One rank owns a replica: it publishes to it. Others follow: they generate, and go through the calls of an
    update without sending anything, so that they know what is served; the caller ensures that a follower
    generates only after the owner's commit.

    Attributes:
        is_owner: whether this rank publishes to the replica.
        engine_ranks: processes that hold a part of the model, each of which acknowledges a bucket.
        transfer_group: the name of the process group that they have joined for updates, as far as the owner
            knows; None: none.
        dtype: of the weights.
    """

    is_embedded: ClassVar[bool] = False
    is_owner: bool
    engine_ranks: int
    transfer_group: str | None
    dtype: torch.dtype

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the replica is reached: http://HOST:PORT, with a user and a password where it wants them."""

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]:
        """Ways in which a bucket can reach it."""

    @abstractmethod
    def join_group(self, address: GroupAddress) -> None:
        """Have the engine's ranks join a process group with the trainer's (instead of the one before), for
        buckets of transport `group`. The owner calls it.

        Raises:
            EngineError: a rank can't, or not all members come in time.
        """

    @abstractmethod
    def receive(self, manifest: BucketManifest) -> list[Ack]:
        """Have the engine's ranks take one bucket of the open update; return what each acknowledges.

        A follower only notes which tensors its owner sends, and returns nothing.

        Raises:
            EngineError: no update to the manifest's version is open; a tensor is unknown, repeated,
                misshapen, not finite, or not what its checksum says (it is named); an acknowledgement is
                missing or differs (see check_acks).
        """

    @abstractmethod
    def complete_update(self, version: int) -> None:
        """Close the transaction: drop caches. The version does not serve yet: the engine is "verifying".

        It answers `sample_probe` alone, and running requests wait, until `serve_update` or
        `abort_update`, which leaves it stale. Raises EngineError if tensors are missing (they are named).
        """

    @abstractmethod
    def sample_probe(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Sample completion 0 of a prompt under the version that is complete and does not serve yet. Raises
        EngineError if none is.
        """

    @abstractmethod
    def serve_update(self, version: int) -> None:
        """Serve the version that is complete. Raises EngineError if none is, or another."""

    def commit_update(self, version: int) -> None:
        self.complete_update(version)
        self.serve_update(version)

    @abstractmethod
    def parameter_checksums(self) -> list[dict[str, str]]:
        """Return the checksums of every engine rank's own parameters, by name: two ways of loading can be
        compared bit for bit. Raises EngineError if the engine can't tell.
        """


def check_acks(manifest: BucketManifest, acks: list[Ack], engine_ranks: int) -> None:
    """Compare what engine ranks acknowledge with what was sent.

    Raises:
        EngineError: names the engine rank, the tensor and both values.
    """
    where = f"weight version {manifest.version}"
    by_rank = {ack["rank"]: ack for ack in acks}
    for rank in range(engine_ranks):
        if rank not in by_rank:
            raise EngineError(f"{where}: engine rank {rank} acknowledged nothing")
        ack, entries = by_rank[rank], manifest.entries_for(rank)
        if ack["version"] != manifest.version:
            raise EngineError(f"{where}: engine rank {rank} acknowledged version {ack['version']}")
        for entry in entries:
            found = ack["tensors"].get(entry.name)
            if found != entry.checksum:
                raise EngineError(
                    f"{where}: engine rank {rank}: {entry.name}: checksum {found}, sent was {entry.checksum}"
                )
        expected = sum(entry.nbytes for entry in entries)
        if ack["bytes"] != expected:
            raise EngineError(
                f"{where}: engine rank {rank} acknowledged {ack['bytes']} bytes, sent were {expected}"
            )
