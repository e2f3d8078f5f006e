"""Publishes the actor's weights to the rollout engines, as one transaction per version."""

from dataclasses import dataclass

from megagrpo.rollout.engines.base import Engine
from megagrpo.weights.export import WeightExporter


@dataclass(frozen=True)
class PublishStats:
    """Bytes of one publish on this rank."""

    version: int
    received_bytes: int  # from other ranks
    loaded_bytes: int  # handed to the engine


class WeightPublisher:
    """Streams the exporter's buckets into this rank's engine.

    The engine serves `version` only after the commit; an error between begin and commit leaves it refusing to generate, so no
    completion is ever sampled from mixed weights.
    """

    def __init__(self, exporter: WeightExporter, engine: Engine):
        self.exporter, self.engine = exporter, engine

    def publish(self, version: int) -> PublishStats:
        """Bring the engine to `version`. Collective over the tp and pp groups."""
        self.engine.begin_update(version)
        try:
            self.engine.load(self.exporter.tensors())
            self.engine.commit_update(version)
        except BaseException:
            self.engine.abort_update()
            raise
        stats = self.exporter.stats
        return PublishStats(version, stats.gathered_bytes + stats.broadcast_bytes, stats.exported_bytes)
