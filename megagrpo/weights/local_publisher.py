"""Publishing to the engine that is embedded in each rank: every rank's engine holds the whole model, so full
tensors are streamed into it.

The stream copies into the live model, tensor by tensor; no bucket memory, no checksums: nothing leaves the
process.
"""

from collections.abc import Collection

from megagrpo.engines.base import EmbeddedEngine
from megagrpo.weights.export import WeightExporter
from megagrpo.weights.publisher import Publisher, PublishStats


class LocalPublisher(Publisher):
    """Streams the exporter's buckets into this rank's engine."""

    def __init__(self, exporter: WeightExporter, engine: EmbeddedEngine):
        self.exporter, self.engine = exporter, engine

    def publish(self, version: int, replicas: Collection[int] | None = None) -> PublishStats:
        """Bring the engine to `version`. Collective over the tp and pp groups."""
        self.engine.begin_update(version)
        try:
            self.engine.load(self.exporter.tensors())
            self.engine.commit_update(version)
        except BaseException:
            self.engine.abort_update()
            raise
        stats = self.exporter.stats
        received = stats.gathered_bytes + stats.broadcast_bytes
        return PublishStats(version, received, stats.exported_bytes, {"publish/received_bytes": received})
