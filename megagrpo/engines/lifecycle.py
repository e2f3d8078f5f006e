"""The states of an engine: one table says what is allowed in which state and where it leads, for engines of
every kind.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from megagrpo.engines.base import EngineError, EngineHealth, EngineState


class Action(StrEnum):
    """What is asked of an engine."""

    GENERATE = "generate"
    PROBE = "probe"
    BEGIN = "begin_update"
    JOIN = "join_group"
    TAKE = "load"  # weights of an open update
    COMPLETE = "complete_update"
    SERVE = "serve_update"
    ABORT = "abort_update"
    SLEEP = "sleep"
    WAKE = "wake"


_AT_REST = (EngineState.EMPTY, EngineState.SERVING, EngineState.STALE)
_BACK = None  # back to the state at rest: STALE once weights were overwritten

TRANSITIONS: Mapping[Action, Mapping[EngineState, EngineState | None]] = {
    Action.GENERATE: {EngineState.SERVING: EngineState.SERVING},
    Action.PROBE: {EngineState.VERIFYING: EngineState.VERIFYING},
    Action.BEGIN: dict.fromkeys(_AT_REST, EngineState.UPDATING),
    Action.JOIN: {state: state for state in (*_AT_REST, EngineState.UPDATING)},
    Action.TAKE: {EngineState.UPDATING: EngineState.UPDATING},
    Action.COMPLETE: {EngineState.UPDATING: EngineState.VERIFYING},
    Action.SERVE: {EngineState.VERIFYING: EngineState.SERVING},
    Action.ABORT: {EngineState.UPDATING: _BACK, EngineState.VERIFYING: _BACK},
    Action.SLEEP: dict.fromkeys((*_AT_REST, EngineState.ASLEEP), EngineState.ASLEEP),
    Action.WAKE: {EngineState.ASLEEP: _BACK},
}
"""Action -> {state in which it is allowed: state that it leads to}. CLOSED and DEAD allow nothing."""

_REASONS = {
    EngineState.EMPTY: "no weights were committed yet",
    EngineState.STALE: "an update failed half-way",
    EngineState.UPDATING: "an update is open",
    EngineState.VERIFYING: "the new weights are not verified yet",
}


class EngineLifecycle:
    """The state of one engine, with the version of its weights.

    Attributes:
        version: the committed version; None before the first commit and once its weights are overwritten.
        opened: the target version of the open or the last update; None: there was none.
        newest_version: the highest version to which an update was begun: no completion can be of a later one.
    """

    def __init__(self, updates_in_place: bool = False, find_loss: Callable[[], str | None] = lambda: None):
        """Begin empty: no version serves.

        Args:
            updates_in_place: weights are overwritten where `generate` reads them, so neither an update nor
                sleep may begin while it runs.
            find_loss: says why the engine's process is dead; None while it is not.
        """
        self._updates_in_place, self._find_loss = updates_in_place, find_loss
        self._lock = threading.Lock()  # one thread generates while another asks for an update
        self._num_generating = 0
        self._is_closed = False
        self.newest_version = 0
        self.forget()

    @property
    def state(self) -> EngineState:
        """What the engine is doing now."""
        if self._is_closed:
            return EngineState.CLOSED
        return EngineState.DEAD if self._find_loss() else self._state

    def health(self) -> EngineHealth:
        """Return what the engine says about itself."""
        state = self.state
        if state is EngineState.DEAD:
            return EngineHealth(False, state, None, self._find_loss() or "")
        return EngineHealth(state is EngineState.SERVING, state, self.version, _REASONS.get(state, ""))

    def require(self, action: Action) -> None:
        """Raise EngineError, with the reason, unless `action` is allowed now."""
        state = self.state
        if state in TRANSITIONS[action]:
            return
        if action is Action.BEGIN and state is EngineState.UPDATING:
            raise EngineError(f"{action}: the update to version {self.opened} is still open")
        if action is Action.TAKE and state in _AT_REST:
            raise EngineError(f"{action}: no weight update is open")
        detail = self.health().detail
        raise EngineError(f"the rollout engine is {state}" + (f": {detail}" if detail else ""))

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Enter `generate`: what may not begin meanwhile is refused. Raises EngineError unless the engine
        serves.
        """
        with self._lock:
            self.require(Action.GENERATE)
            self._num_generating += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_generating -= 1

    def begin(self, version: int) -> None:
        """Open an update; see Engine.begin_update."""
        with self._lock:
            self.require(Action.BEGIN)
            if self._last_version is not None and version <= self._last_version:
                raise EngineError(
                    f"weight version {version} is not above version {self._last_version}, which is committed"
                )
            self._require_idle(f"weight version {version}: an update can't begin")
            self._move(Action.BEGIN)
            self.opened, self.newest_version = version, max(version, self.newest_version)

    def require_open(self, version: int) -> None:
        """Raise EngineError unless the open update, of which a bucket has come, is to `version`."""
        self.require(Action.TAKE)
        if version != self.opened:
            raise EngineError(
                f"load: a bucket of version {version} came in the update to version {self.opened}"
            )

    def overwrite(self) -> None:
        """Note that the old weights are no longer whole: nothing can be served until a whole update is."""
        self.version, self._rest = None, EngineState.STALE

    def require_completable(self, version: int) -> None:
        """Raise EngineError unless the open update is to `version`."""
        if self.state in _AT_REST:
            raise EngineError(f"weight version {version}: no update to it is open")
        self.require(Action.COMPLETE)
        if version != self.opened:
            raise EngineError(f"weight version {version}: no update to it is open, but one to {self.opened}")

    def complete(self, version: int) -> None:
        """Note that the engine holds all of `version`, which does not serve yet."""
        self.require_completable(version)
        self.overwrite()
        self._move(Action.COMPLETE)

    def require_servable(self, version: int) -> None:
        """Raise EngineError unless `version` is complete and does not serve yet."""
        self.require(Action.SERVE)
        if version != self.opened:
            raise EngineError(
                f"weight version {version}: it is version {self.opened} that was committed "
                "and does not serve yet"
            )

    def serve(self, version: int) -> None:
        """Note that `version`, which is complete, serves."""
        self.require_servable(version)
        self._move(Action.SERVE)
        self._rest, self.version, self._last_version = EngineState.SERVING, version, version

    def serve_from_start(self, is_any_version: bool = False) -> None:
        """Note that the engine serves weights that it was built with, as version 0.

        Args:
            is_any_version: they may come labelled as any version: another process has published them.
        """
        self.begin(0)
        self.complete(0)
        self.serve(0)
        if is_any_version:
            self.newest_version = sys.maxsize

    @property
    def is_closed(self) -> bool:
        """Whether the engine is closed."""
        return self._is_closed

    @property
    def is_open(self) -> bool:
        """Whether there is an update that `abort` would close, whatever became of the engine's process."""
        return self._state in TRANSITIONS[Action.ABORT]

    def abort(self) -> None:
        """Close the open update, if there is one, without a commit: the version before it serves again if
        nothing was overwritten yet.
        """
        if self.is_open:
            self._move(Action.ABORT)

    def sleep(self, keeps_weights: bool = True) -> None:
        """Note that the engine sleeps; without its weights it wakes empty."""
        with self._lock:
            self.require(Action.SLEEP)
            self._require_idle("the rollout engine can't sleep")
            self._move(Action.SLEEP)
            if not keeps_weights:
                self.version, self._rest = None, EngineState.EMPTY

    def wake(self) -> None:
        """Note that the engine is awake again."""
        self.require(Action.WAKE)
        self._move(Action.WAKE)

    @property
    def is_asleep(self) -> bool:
        """Whether `wake` is due, whatever became of the engine's process."""
        return self._state is EngineState.ASLEEP

    def forget(self) -> None:
        """Treat the engine as empty: the next update may be to any version."""
        self._state: EngineState = EngineState.EMPTY
        self._rest: EngineState = EngineState.EMPTY
        self.version: int | None = None
        self.opened: int | None = None
        self._last_version: int | None = None  # survives staleness: a retry needs a version above it

    def close(self) -> bool:
        """Note that the engine is closed; say whether it was open."""
        was_open, self._is_closed = not self._is_closed, True
        return was_open

    def _require_idle(self, what: str) -> None:
        if self._updates_in_place and self._num_generating:
            raise EngineError(
                f"{what}: completions are generated in another thread, with the weights that it would change"
            )

    def _move(self, action: Action) -> None:
        target = TRANSITIONS[action][self._state]
        self._state = self._rest if target is _BACK else target
