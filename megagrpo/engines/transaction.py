"""The state of an engine's weight transactions, and the checks on every tensor that arrives in one."""

from collections.abc import Hashable, Mapping

import torch

from megagrpo.engines.base import EngineError

_SHOWN = 5  # missing tensors that an error names


class WeightTransaction:
    """Which version an engine holds, which one is on its way, and what of it has come.

    Attributes:
        shapes: the tensors that a whole version has, by key, with their shapes. The key is the tensor's name,
            or (name, engine rank) where every engine rank gets tensors of its own.
        version: the committed version; None before the first commit and while stale.
        updating: whether a transaction is open.
        opened: the version that it (or the last one) is to.
        stale: whether an update failed after it overwrote some of the weights.
    """

    def __init__(self, shapes: Mapping[Hashable, torch.Size]):
        self.shapes = shapes
        self.version: int | None = None
        self.updating = False
        self.stale = False
        self._last_version: int | None = None  # survives staleness: a retry needs a version above it
        self.opened: int | None = None
        self._loaded: set[Hashable] = set()

    def begin(self, version: int) -> None:
        """Open a transaction; see Engine.begin_update."""
        if self.updating:
            raise EngineError(f"weight version {version}: the update to version {self.opened} is still open")
        if self._last_version is not None and version <= self._last_version:
            raise EngineError(
                f"weight version {version} is not above version {self._last_version}, which is committed"
            )
        self.updating, self.opened = True, version
        self._loaded.clear()

    def require_open(self, version: int | None = None) -> None:
        """Raise EngineError unless a transaction (to `version`, where one is given) is open."""
        if not self.updating:
            raise EngineError("load: no weight update is open")
        if version not in (None, self.opened):
            raise EngineError(
                f"load: a bucket of version {version} came in the update to version {self.opened}"
            )

    def check(self, key: Hashable, shape: torch.Size | tuple[int, ...]) -> None:
        """Raise EngineError if the model has no such tensor, or it has come already, or its shape is
        another.
        """
        name, expected = _describe(key), self.shapes.get(key)
        if expected is None:
            raise EngineError(f"weight {name}: the model has no such tensor")
        if key in self._loaded:
            raise EngineError(f"weight {name}: loaded twice in one update")
        if tuple(shape) != tuple(expected):
            raise EngineError(f"weight {name}: shape {tuple(shape)}, the model's is {tuple(expected)}")

    def mark_overwritten(self) -> None:
        """Note that the old weights are no longer whole: until the commit nothing can be served."""
        self.version, self.stale = None, True

    def mark_loaded(self, key: Hashable) -> None:
        """Note that the tensor `key` has come."""
        self._loaded.add(key)

    def check_complete(self, version: int) -> None:
        """Raise EngineError unless the open transaction is to `version` and every tensor has come."""
        if not self.updating or version != self.opened:
            raise EngineError(
                f"weight version {version}: no update to it is open"
                + (f", but one to {self.opened}" if self.updating else "")
            )
        missing = sorted(_describe(key).strip("'") for key in self.shapes.keys() - self._loaded)
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise EngineError(
                f"weight version {version}: {len(missing)} of {len(self.shapes)} tensors are missing: {shown}"
            )

    def mark_complete(self, version: int) -> None:
        """Note that the engine holds all of `version`."""
        self.updating, self.stale = False, False
        self.version = self._last_version = version

    def abort(self) -> None:
        """Close the transaction without a commit; the version before it stays if nothing was overwritten
        yet.
        """
        self.updating = False


def _describe(key: Hashable) -> str:
    return f"{key[0]!r} of engine rank {key[1]}" if isinstance(key, tuple) else repr(key)
