"""The one door for every extension point: a registered name, `FILE.py:attribute` or
`package.module:attribute`. Imports no torch: reward workers start with it.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from megagrpo.errors import UserError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A table of named implementations of one contract, open to a user's own by the place of their code.

    Example:
        >>> losses = Registry("loss")
        >>> @losses.register("clip")
        ... def clip_loss(inputs): ...
        >>> losses.find("clip") is clip_loss
        True
        >>> losses.find("examples/custom_algorithm.py:power_clip")  # doctest: +SKIP
    """

    def __init__(
        self,
        kind: str,
        read: Callable[[Any], Entry] | None = None,
        how_to_add: str = "your own as FILE.py:NAME",
    ):
        """Begin without entries.

        Args:
            kind: what the entries are, in the words of messages.
            read: makes the entry of a user's attribute, and raises UserError with what the attribute lacks;
                None: the attribute is the entry.
            how_to_add: what messages offer beside the registered names.
        """
        self.kind, self._read, self._how_to_add = kind, read, how_to_add
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that adds its argument under `name`; a name already taken raises ValueError."""

        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            self._entries[name] = entry
            return entry

        return add

    def override(self, name: str, entry: Entry) -> None:
        """Let `name` mean `entry` in this process, whether or not it is registered."""
        self._entries[name] = entry

    def get(self, name: str) -> Entry:
        """Return the entry called `name`; an unknown name raises UserError with the nearest match and all
        names.
        """
        if name in self._entries:
            return self._entries[name]
        raise UserError(
            f"no {self.kind} is called {name!r}{suggestion(name, self.names())}; there are "
            f"{', '.join(self.names())}, and {self._how_to_add}"
        )

    def find(self, name: str) -> Entry:
        """Return the entry that `name` means: a registered one, or a user's by the place of its code.

        Raises:
            UserError: an unknown name, code that is missing or fails on import, or that does not meet the
                contract; one line names the place, the contract and what is missing.
        """
        return self.adopt(name, load_attribute(name)) if self.is_own_code(name) else self.get(name)

    def adopt(self, place: str, attribute: Any) -> Entry:
        """Return the entry that an attribute of a user's code makes; `place` names it in the UserError where
        it does not meet the contract.
        """
        try:
            return self._read(attribute) if self._read else attribute
        except UserError as error:
            raise UserError(f"{place}: is no {self.kind}: {error}") from error

    def entry_of(self, function: Any) -> Entry:
        """Return the registered entry that wraps `function` (in a field `function`), for contracts whose
        parts are decorated. Raises UserError where none does.
        """
        for entry in self._entries.values():
            if getattr(entry, "function", self) is function:
                return entry
        raise UserError("the function is not decorated (examples/custom_algorithm.py)")

    def is_own_code(self, name: str) -> bool:
        """Return whether `name` is the place of a user's code rather than a registered name."""
        return name not in self._entries and is_code_place(name)

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._entries)


def suggestion(name: str, known: list[str]) -> str:
    """Return `; did you mean X?` for the known name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def is_code_place(name: str) -> bool:
    """Return whether `name` has the form of a place of code rather than of a name or a data file's path."""
    location, colon, attribute = name.rpartition(":")
    return bool(colon and location and attribute.isidentifier())


def load_attribute(place: str) -> Any:
    """Return the attribute that `place` names.

    A file is imported once per process, under a name made of its path, and its folder is appended to
    `sys.path`, so that it may import its neighbours. A spawned process calls this again with the same string.

    Args:
        place: `FILE.py:attribute` (a relative path is relative to the working directory) or
            `package.module:attribute`.

    Raises:
        UserError: the form is wrong, the file or module is missing or fails on import, or it has no such
            attribute.

    Example:
        >>> load_attribute("math:sqrt")(4.0)
        2.0
    """
    if not is_code_place(place):
        raise UserError(f"{place!r}: is not FILE.py:name or package.module:name")
    location, _, name = place.rpartition(":")
    module = (
        _import_file(place, Path(location)) if location.endswith(".py") else _import_module(place, location)
    )
    if not hasattr(module, name):
        near = suggestion(name, [known for known in vars(module) if not known.startswith("_")])
        raise UserError(f"{place}: {location} has no {name!r}{near}")
    return getattr(module, name)


def load_callable(place: str) -> Callable[..., Any]:
    """Return the function that `place` names; see `load_attribute`. UserError too where it is none."""
    found = load_attribute(place)
    if not callable(found):
        name = place.rpartition(":")[2]
        raise UserError(f"{place}: {name!r} is a {type(found).__name__}, not a function")
    return found


def _import_file(place: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{place}: no file {path}")
    name = f"megagrpo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's file never shadows an installed module
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{place}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{place}: importing {path} raised {_one_line(error)}") from error
    return module


def _import_module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{place}: importing {name} raised {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def require_call(function: Any, parameters: Sequence[str], options: Iterable[str] = ()) -> None:
    """Raise UserError unless `function` can be called with these positional parameters and named options.

    Args:
        function: what a user's attribute is, or a method of it.
        parameters: one word for each positional argument.
        options: names of keyword arguments.
    """
    wanted = f"({', '.join([*parameters, *(f'{name}=' for name in options)])})"
    if not callable(function):
        raise UserError(f"a {type(function).__name__} can't be called with {wanted}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin: its first call tells
    try:
        signature.bind(*parameters, **dict.fromkeys(options))
    except TypeError as error:
        takes = f"({', '.join(signature.parameters)})"
        raise UserError(f"it is called with {wanted} and takes {takes}: {error}") from error


def require_methods(part: type, methods: Mapping[str, Sequence[str]]) -> None:
    """Raise UserError naming every method of `methods` (name -> parameters after self) that the class lacks
    or that takes others.
    """
    missing = [name for name in methods if not callable(getattr(part, name, None))]
    if missing:
        raise UserError(f"class {part.__name__} lacks {', '.join(f'{name}()' for name in missing)}")
    for name, parameters in methods.items():
        try:
            require_call(getattr(part, name), ["self", *parameters])
        except UserError as error:
            raise UserError(f"method {name}: {error}") from error
