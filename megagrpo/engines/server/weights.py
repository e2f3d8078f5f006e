"""The weights of a server: its transaction, and the buckets that go to it."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from megagrpo.engines.base import EngineError
from megagrpo.engines.server.bucket_file import bucket_file, fill_buckets
from megagrpo.engines.transaction import WeightTransaction
from megagrpo.wire.manifest import BucketManifest, build_ack

Ack = dict[str, Any]
"""What an engine rank says of a bucket: {"rank", "version", "tensors": {name: checksum}, "bytes"}."""

# of `load`, which takes tensors one by one; a publisher that makes manifests has its own
_LOAD_BUCKET_BYTES = 64 * 2**20


class BucketSink(Protocol):
    """The server that the buckets go to."""

    engine_ranks: int

    def pause(self, abort: bool) -> None:
        """Stop decoding; requests that are on their way wait, or end now if `abort`. Pausing again is no
        error.
        """

    def send_bucket(self, manifest: BucketManifest) -> list[Ack]:
        """Have every engine rank verify and load a bucket; return all acks. Raises EngineError with what a
        rank refused.
        """

    def describe_parameters(self) -> list[dict[str, Any]]:
        """Return {name: {"dtype", "shape"}} of every engine rank's own parameters: the tensors of layout
        `sharded`.
        """


class ServerWeights(WeightTransaction):
    """The transaction of a server's owner, or of a follower, which goes through the same steps and sends
    nothing.
    """

    def __init__(self, full_shapes: Mapping[str, torch.Size], server: BucketSink, is_owner: bool):
        """`full_shapes`: the HF checkpoint's tensors."""
        super().__init__(full_shapes)
        self._full_shapes = full_shapes
        self._sharded_shapes: dict[Hashable, torch.Size] | None = None
        self._server, self._is_owner = server, is_owner
        self._layout: str | None = None  # of the open transaction's buckets
        self._is_paused = False  # by the open transaction
        self.verifying = False  # all of the open transaction's version is there, and it does not serve yet

    def begin(self, version: int) -> None:
        """Open a transaction; its first bucket says in which layout."""
        super().begin(version)
        self._layout, self._is_paused, self.verifying = None, False, False

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take full tensors under their HF names; see Engine.load."""
        self.require_open()
        self._choose_layout("full")
        for bucket in fill_buckets(self._checked(named_tensors), _LOAD_BUCKET_BYTES):
            assert self.opened is not None
            if self._is_owner:
                with bucket_file(self.opened, bucket) as manifest:
                    self.receive(manifest)
            else:
                self._follow((name, tensor.shape) for name, tensor in bucket)

    def receive(self, manifest: BucketManifest) -> list[Ack]:
        """Send one bucket; see RemoteEngine.receive."""
        self.require_open(manifest.version)
        self._choose_layout(manifest.layout)
        keys = list(self._keys(manifest))
        if not self._is_owner:
            self._follow(keys)
            return []
        for key, shape in keys:
            self.check(key, shape)
        if not self._is_paused:
            self._server.pause(abort=False)
            self._is_paused = True
        self.mark_overwritten()
        acks = self._server.send_bucket(manifest)
        expected = [build_ack(manifest, rank) for rank in range(self._server.engine_ranks)]
        if acks != expected:
            raise EngineError(
                f"weight version {manifest.version}: the engine acknowledges {acks}, sent was {expected}"
            )
        for key, _ in keys:
            self.mark_loaded(key)
        return acks

    def mark_verifying(self) -> None:
        """Note that the server holds all of the version: it is stale until that serves."""
        self.mark_overwritten()
        self.verifying = True

    def check_verifying(self, version: int) -> None:
        """Raise EngineError unless it is `version` that is to be verified."""
        if version != self.opened:
            raise EngineError(
                f"weight version {version}: it is version {self.opened} that was committed "
                "and does not serve yet"
            )

    def mark_complete(self, version: int) -> None:
        """Note that `version` serves."""
        super().mark_complete(version)
        self.verifying = False

    def abort(self) -> None:
        """Close the transaction without a commit. A follower can't know how far the owner came, so it is
        stale from then on.
        """
        if self.updating and not self._is_owner:
            self.mark_overwritten()
        super().abort()

    def _follow(self, keys: Iterable[tuple[Hashable, tuple[int, ...]]]) -> None:
        """Note that the owner sends these tensors."""
        for key, shape in keys:
            self.check(key, shape)
            self.mark_overwritten()
            self.mark_loaded(key)

    def _keys(self, manifest: BucketManifest) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        for entry in manifest.tensors:
            if manifest.layout == "full":
                yield entry.name, entry.shape
            else:
                ranks = range(self._server.engine_ranks) if entry.rank is None else [entry.rank]
                yield from (((entry.name, rank), entry.shape) for rank in ranks)

    def _choose_layout(self, layout: str) -> None:
        if self._layout not in (None, layout):
            raise EngineError(
                f"weights: a bucket of layout {layout} came in an update of layout {self._layout}"
            )
        if self._layout is None and layout == "sharded" and self._sharded_shapes is None:
            per_rank = enumerate(self._server.describe_parameters())
            self._sharded_shapes = {
                (name, rank): torch.Size(own["shape"])
                for rank, owned in per_rank
                for name, own in owned.items()
            }
        self._layout = layout
        self.shapes = self._full_shapes if layout == "full" else self._sharded_shapes or {}

    def _checked(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on; one that the model has not, or in another shape, is refused before it is copied
        anywhere.
        """
        for name, tensor in named_tensors:
            self.check(name, tensor.shape)
            yield name, tensor
