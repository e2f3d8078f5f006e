"""What every way of publishing shares: the contract, its statistics, and how ranks agree that all of them
are well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from megagrpo.engines.base import EngineError
from megagrpo.parallel.groups import all_gather_metadata
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
    """Run `step` on every rank; return all results by rank, or raise on all ranks what failed first.
    Collective over all ranks.

    A rank that only waited in vain for another one (a time-out of a collective) is named only where nothing
    else failed.

    Raises:
        PublishError: `step` failed on some rank.
    """
    result, problem, cause = None, None, None
    try:
        result = step()
    except Exception as error:  # whatever it is: told to all ranks, and raised again below
        cause, problem = (
            error,
            f"{what}: {error if isinstance(error, EngineError) else f'{type(error).__name__}: {error}'}",
        )
    gathered = all_gather_metadata((result, problem, cause is not None and _is_timeout(cause)))
    failed = [(late, rank, text) for rank, (_, text, late) in enumerate(gathered) if text]
    if failed:
        _, rank, text = min(failed)
        raise PublishError(f"rank {rank}: {text}") from cause
    return [value for value, *_ in gathered]


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "connection closed by peer" in text


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
