"""An update of a server's weights: the buckets that go to it, and what its ranks acknowledge."""

from collections.abc import Hashable, Iterator, Mapping

import torch

from megagrpo.engines.base import EngineError, EngineState
from megagrpo.engines.bucket_engine import Ack, check_acks
from megagrpo.engines.expected_tensors import ExpectedTensors
from megagrpo.engines.lifecycle import EngineLifecycle
from megagrpo.engines.server.protocol import ServerProtocol
from megagrpo.wire.bucket_manifest import BucketManifest


class BucketUpdate:
    """The updates of a server by its owner, or by a follower, which goes through the same steps and sends
    nothing.
    """

    def __init__(
        self,
        full_shapes: Mapping[str, torch.Size],
        protocol: ServerProtocol,
        lifecycle: EngineLifecycle,
        is_owner: bool,
    ):
        """`full_shapes`: the HF checkpoint's tensors."""
        self._full_shapes, self._protocol = full_shapes, protocol
        self._lifecycle, self._is_owner = lifecycle, is_owner
        self._expected = ExpectedTensors(full_shapes)
        self._sharded_shapes: dict[Hashable, torch.Size] | None = None
        self._layout: str | None = None  # the layout of the open update's buckets
        self._is_paused = False  # whether the open update has paused the server

    def begin(self, version: int) -> None:
        """Open an update; its first bucket says in which layout."""
        self._lifecycle.begin(version)
        self._expected.begin()
        self._layout, self._is_paused = None, False

    def receive(self, manifest: BucketManifest) -> list[Ack]:
        """Send one bucket; see BucketEngine.receive."""
        self._lifecycle.require_open(manifest.version)
        self._choose_layout(manifest.layout)
        keys = list(self._keys(manifest))
        for key, shape in keys:
            self._expected.check(key, shape)
        acks = self._send(manifest) if self._is_owner else []
        for key, _ in keys:
            self._lifecycle.overwrite()
            self._expected.mark_loaded(key)
        return acks

    def complete(self, version: int) -> None:
        """Close the update, which does not serve yet; see BucketEngine.complete_update."""
        self._lifecycle.require_completable(version)
        self._expected.check_complete(version)
        if self._is_owner:
            self._protocol.commit_weights(version)
        self._lifecycle.complete(version)

    def serve(self, version: int) -> None:
        """Serve a version that is complete; see BucketEngine.serve_update."""
        self._lifecycle.require_servable(version)
        if self._is_owner:
            self._protocol.resume(version)
        self._lifecycle.serve(version)

    @property
    def is_past_return(self) -> bool:
        """Whether an abort would leave the engine stale. A follower can't know how far the owner came."""
        return self._lifecycle.is_open and (self._lifecycle.version is None or not self._is_owner)

    def abort(self) -> None:
        """Abort the open update; see `is_past_return` for what is left."""
        if not self._lifecycle.is_open:
            return
        if not self._is_owner:
            self._lifecycle.overwrite()
        self._lifecycle.abort()
        if self._is_owner and self._lifecycle.state is EngineState.STALE:
            self._protocol.pause(abort=True)  # nothing that is on its way may go on under half an update

    def _send(self, manifest: BucketManifest) -> list[Ack]:
        if not self._is_paused:
            self._protocol.pause(abort=False)
            self._is_paused = True
        self._lifecycle.overwrite()
        acks = self._protocol.send_bucket(manifest)
        check_acks(manifest, acks, self._protocol.engine_ranks)
        return acks

    def _keys(self, manifest: BucketManifest) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        for entry in manifest.tensors:
            if manifest.layout == "full":
                yield entry.name, entry.shape
            else:
                ranks = range(self._protocol.engine_ranks) if entry.rank is None else [entry.rank]
                yield from (((entry.name, rank), entry.shape) for rank in ranks)

    def _choose_layout(self, layout: str) -> None:
        if self._layout not in (None, layout):
            raise EngineError(
                f"weights: a bucket of layout {layout} came in an update of layout {self._layout}"
            )
        if self._layout is None and layout == "sharded" and self._sharded_shapes is None:
            per_rank = enumerate(self._protocol.describe_parameters())
            self._sharded_shapes = {
                (name, rank): torch.Size(own["shape"])
                for rank, owned in per_rank
                for name, own in owned.items()
            }
        self._layout = layout
        self._expected.shapes = self._full_shapes if layout == "full" else self._sharded_shapes or {}
