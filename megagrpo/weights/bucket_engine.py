"""What a publisher and its transport need of an engine that takes weights in buckets."""

from typing import Protocol

from megagrpo.weights.acknowledgements import Ack
from megagrpo.wire.manifest import BucketManifest
from megagrpo.wire.transfer_group import GroupAddress


class BucketEngine(Protocol):
    """What is needed of an engine. Every rank has one; a rank that does not own its server goes through
    the calls and sends nothing.
    """

    is_owner: bool
    engine_ranks: int
    # name of the group that the server's ranks have joined, as far as the owner knows
    transfer_group: str | None

    @property
    def address(self) -> str:
        """Of its server, http://HOST:PORT."""

    @property
    def weight_version(self) -> int | None:
        """The version that serves; None: none does."""

    def join_group(self, address: GroupAddress) -> None:
        """Have the engine's ranks join a group (instead of the one before). Raises EngineError if one
        can't. The owner's call.
        """

    def begin_update(self, version: int) -> None:
        """Open a transaction."""

    def receive(self, manifest: BucketManifest) -> list[Ack]:
        """Have the engine's ranks verify and load a bucket; return what each acknowledges."""

    def complete_update(self, version: int) -> None:
        """Close the transaction: drop caches. The version does not serve yet; nothing but the probe is
        answered.
        """

    def serve_update(self, version: int) -> None:
        """Serve the version that is complete."""

    def abort_update(self) -> None:
        """Give the open transaction up, or the version that is complete and does not serve yet."""

    def parameter_checksums(self) -> list[dict[str, str]]:
        """Return the checksums of every engine rank's own parameters, by name. Raises EngineError if it
        can't tell.
        """
