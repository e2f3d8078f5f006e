"""What every way of publishing shares: the contract, its statistics, and how ranks agree that a step
succeeded on all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from megagrpo.engines.base import EngineError
from megagrpo.parallel import agreement
from megagrpo.parallel.agreement import describe_error
from megagrpo.weights.export import WeightExporter


class PublishError(EngineError):
    """A publish failed somewhere; raised on all ranks alike, with the rank that failed first and its
    reason.
    """


@dataclass(frozen=True)
class PublishStats:
    """One publish: bytes of this rank, and the run's metrics."""

    version: int
    received_bytes: int  # by this rank, from other ranks
    loaded_bytes: int  # handed to this rank's engine
    metrics: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the run's log


class Publisher(ABC):
    """Brings the actor's weights to this rank's engine, one transaction per version.

    The engine serves a version only after its commit; an error before leaves it with the old version, or
    refusing to generate, so no completion is ever sampled from mixed weights.
    """

    exporter: WeightExporter  # the stream of full tensors, which exports of the model are made from too

    @abstractmethod
    def publish(self, version: int, replicas: Collection[int] | None = None) -> PublishStats:
        """Bring the engines to `version`. Collective over all ranks.

        Args:
            version: above any that an engine holds.
            replicas: only these (of engines in processes of their own); None: all.

        Raises:
            EngineError: the update failed.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Give back what is held between publishes."""


def agree(step: Callable[[], Any], what: str) -> list[Any]:
    """Run a step of a publish on every rank; see `parallel.agreement.agree`. Collective over all ranks.

    Raises:
        PublishError: `step` failed on some rank.
    """

    def describe(error: BaseException) -> str:
        return str(error) if isinstance(error, EngineError) else describe_error(error)

    return agreement.agree(
        step, lambda failed: PublishError(f"rank {failed.rank}: {what}: {failed.text}"), describe
    )


class Stages:
    """Seconds of the stages of a publish."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Any:
        """Add the time of a block to a stage."""
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - started
