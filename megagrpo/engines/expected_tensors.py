"""The tensors that a whole weight version has, and the checks on every one that arrives in an update."""

from collections.abc import Hashable, Mapping

import torch

from megagrpo.engines.base import EngineError

_SHOWN = 5  # missing tensors that an error names


class ExpectedTensors:
    """What of one update has come.

    Attributes:
        shapes: the tensors of a whole version, by key, with their shapes. The key is the tensor's name, or
            (name, engine rank) where every engine rank gets tensors of its own.
    """

    def __init__(self, shapes: Mapping[Hashable, torch.Size]):
        self.shapes = shapes
        self._loaded: set[Hashable] = set()

    def begin(self) -> None:
        """Expect all tensors again."""
        self._loaded.clear()

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

    def mark_loaded(self, key: Hashable) -> None:
        """Note that the tensor `key` has come."""
        self._loaded.add(key)

    def check_complete(self, version: int) -> None:
        """Raise EngineError unless every tensor of `version` has come."""
        missing = sorted(_describe(key).strip("'") for key in self.shapes.keys() - self._loaded)
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise EngineError(
                f"weight version {version}: {len(missing)} of {len(self.shapes)} tensors are missing: {shown}"
            )


def _describe(key: Hashable) -> str:
    return f"{key[0]!r} of engine rank {key[1]}" if isinstance(key, tuple) else repr(key)
