"""The contract of a rollout engine. Its tests are tests/contracts/test_engine_contract.py and
test_engine_update_contract.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import torch

from megagrpo.device.device import has_cuda
from megagrpo.device.memory import return_cached_memory
from megagrpo.errors import ForeignError, UserError
from megagrpo.parallel.groups import all_reduce_flag
from megagrpo.registry import Registry, require_call
from megagrpo.types import Completion, Prompt, SamplingParams

OnGroup = Callable[[int, list[Completion]], None]
"""Takes a finished group: position of its prompt in the call, and its completions in the order asked for."""


class EngineError(ForeignError):
    """The engine can't do what was asked: a broken update, a call in the wrong state, logits that are not
    finite.
    """


class EngineState(StrEnum):
    """What an engine is doing; lifecycle.py says what leads from one state to another."""

    EMPTY = "empty"  # no weights were committed yet
    SERVING = "serving"
    UPDATING = "updating"  # a weight update is open
    VERIFYING = "verifying"  # a whole version has come and does not serve yet: the probe alone is answered
    STALE = "stale"  # an update failed after it had overwritten weights
    ASLEEP = "asleep"
    DEAD = "dead"  # its process has ended or is silent
    CLOSED = "closed"


@dataclass(frozen=True)
class EngineHealth:
    """What an engine says about itself."""

    ready: bool  # generate() would be served now
    state: EngineState
    weight_version: int | None
    detail: str = ""  # why it is not ready


class Engine(ABC):
    """Samples completions under a known version of the weights.

    Weights arrive in transactions: `begin_update(version)`, the weights, `commit_update(version)`. An
    embedded engine, which lives in the rank's process, takes them as tensors (`EmbeddedEngine.load`); an
    engine in processes of its own takes buckets that a manifest describes (`BucketEngine.receive`).

    Completions are generated under committed versions only. While an update is open an engine either serves
    the version before it, or refuses to generate (the embedded engine, which overwrites its weights: a
    second copy would be larger than needed). An update that fails or is aborted after it overwrote weights
    leaves the engine stale: it refuses to generate until a whole update is committed. What was computed from
    older weights (KV and prefix caches) is dropped in the commit.

    What is registered in ENGINES says `is_embedded` and is called with (model_folder, config, tokenizer=,
    device=, dtype=, load_weights=), and with address=, is_owner= and log_file= too where it is not embedded.

    Attributes:
        is_embedded: whether the engine is part of the rank: where it fails, another rank's would too.
    """

    is_embedded: ClassVar[bool]

    @property
    @abstractmethod
    def weight_version(self) -> int | None:
        """The committed version that would serve now; None before the first commit and while stale."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        completion_indices: Sequence[int],
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Sample the completions `completion_indices` (say, range(G)) of every prompt.

        Completion i of a prompt depends on (sampling, prompt, i, weights) alone: asking for it
        together with others, in another order, or on another rank gives the same tokens.

        Args:
            on_group: called once per prompt, as soon as all of its completions have ended and while those of
                others still run, so that they can be scored meanwhile. From any thread, one call at a time,
                before `generate` returns.

        Returns:
            One list per prompt, in order, each with one Completion per entry of `completion_indices`, in
            order.

        Raises:
            UserError: a prompt is empty, holds an unknown token id, or does not fit the model's context with
                its completion.
            EngineError: no weights are committed, an update is open, the engine sleeps or is closed, logits
                are not finite, or a server's answer is not what was asked for.
        """

    @abstractmethod
    def begin_update(self, version: int) -> None:
        """Open a transaction.

        Raises:
            EngineError: one is open, `version` is not above the last committed one, or weights that are
                overwritten in place are in use by a `generate` in another thread.
        """

    @abstractmethod
    def commit_update(self, version: int) -> None:
        """Close the transaction: from here on `version` serves. Raises EngineError if tensors are missing
        (they are named).
        """

    @abstractmethod
    def abort_update(self) -> None:
        """Abort the open transaction; without one, do nothing."""

    @abstractmethod
    def sleep(self) -> None:
        """Free accelerator memory between rollouts; generate() and updates are errors until `wake()`.

        An engine that drops its weights is empty then: it generates after the next whole update.
        """

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep()`."""

    @abstractmethod
    def abort(self) -> None:
        """End a `generate()` that runs in another thread: it returns what it has, unfinished completions
        as "abort".
        """

    @abstractmethod
    def health(self) -> EngineHealth:
        """Say whether the engine can serve; never raises."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; further calls but `health` and `close` are errors."""


class EmbeddedEngine(Engine):
    """An engine in the rank's own process."""

    is_embedded = True

    @abstractmethod
    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take one bucket of full tensors under their names in the HF checkpoint (a tied head is not among
        them).

        Raises:
            EngineError: no update is open, or a tensor (it is named) is unknown, repeated, misshapen or not
                finite.
        """


@contextmanager
def asleep(engine: Engine, wanted: bool) -> Iterator[None]:
    """Let `engine` sleep while the context lasts, if `wanted`. All ranks that share its server must have
    ended their rollouts. Collective over all ranks on GPUs.

    An engine that is dead, or dies meanwhile, is left to its recovery.
    """
    if wanted:
        _unless_dead(engine, engine.sleep)
    try:
        yield
        if wanted and has_cuda():  # all ranks of its GPUs, before it takes its memory
            return_cached_memory()
            all_reduce_flag(False)
    finally:
        if wanted and engine.health().state == EngineState.ASLEEP:
            _unless_dead(engine, engine.wake)


def _unless_dead(engine: Engine, call: Callable[[], None]) -> None:
    try:
        call()
    except EngineError:
        if engine.health().state != EngineState.DEAD:
            raise


class EngineFactory(Protocol):
    """What builds an engine; see Engine for how it is called. A class that implements Engine is one."""

    is_embedded: bool

    def __call__(self, *arguments: Any, **options: Any) -> Engine:
        """Return the engine."""


def _read_engine(attribute: Any) -> EngineFactory:
    is_embedded = getattr(attribute, "is_embedded", None)
    if not isinstance(is_embedded, bool):
        raise UserError("it has no is_embedded, True where it lives in the ranks, False for servers")
    options = ["tokenizer", "device", "dtype", *(() if is_embedded else ("address", "log_file"))]
    require_call(attribute, ["model_folder", "config"], options)
    return attribute


ENGINES: Registry[EngineFactory] = Registry("engine", _read_engine)
