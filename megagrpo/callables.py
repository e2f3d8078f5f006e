"""User code by name: `FILE.py:function` or `package.module:function`. Imports no torch: reward workers
start with it.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megagrpo.errors import UserError
from megagrpo.registry import suggestion


def load_callable(spec: str) -> Callable[..., Any]:
    """Return the callable that `spec` names.

    A file is imported once per process, under a name made of its path, and its folder is appended to
    `sys.path`, so that it may import its neighbours. A spawned process calls this again with the same string.

    Args:
        spec: `FILE.py:function` (a relative path is relative to the working directory) or
            `package.module:function`.

    Raises:
        UserError: the form is wrong, the file or module is missing or fails on import, the name is missing or
            not callable.

    Example:
        >>> load_callable("math:sqrt")(4.0)
        2.0
    """
    location, colon, name = spec.rpartition(":")
    if not (colon and location and name.isidentifier()):
        raise UserError(f"{spec!r}: is not FILE.py:function or package.module:function")
    module = (
        _import_file(spec, Path(location)) if location.endswith(".py") else _import_module(spec, location)
    )
    if not hasattr(module, name):
        near = suggestion(name, [known for known in vars(module) if not known.startswith("_")])
        raise UserError(f"{spec}: {location} has no {name!r}{near}")
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{spec}: {name!r} is a {type(found).__name__}, not a function")
    return found


def is_callable_spec(source: str) -> bool:
    """Return whether `source` has the form of a callable's name rather than of a data file's path."""
    location, colon, name = source.rpartition(":")
    return bool(colon and location and name.isidentifier())


def _import_file(spec: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{spec}: no file {path}")
    name = f"megagrpo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's file never shadows an installed module
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{spec}: importing {path} raised {_one_line(error)}") from error
    return module


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{spec}: importing {name} raised {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
