"""Named extension points: register / get / names."""

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

from megagrpo.errors import UserError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A table of named implementations of one contract.

    Example:
        >>> losses = Registry("loss")
        >>> @losses.register("clip")
        ... def clip_loss(inputs): ...
        >>> losses.get("clip") is clip_loss
        True
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that adds its argument under `name`; a name already taken raises ValueError."""

        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> Entry:
        """Return the entry called `name`; an unknown name raises UserError with the nearest match and all
        names.
        """
        if name in self._entries:
            return self._entries[name]
        raise UserError(
            f"{self.kind} {name!r} is not registered{suggestion(name, self.names())}; known: "
            f"{', '.join(self.names())}"
        )

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._entries)


def suggestion(name: str, known: list[str]) -> str:
    """Return `; did you mean X?` for the known name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
