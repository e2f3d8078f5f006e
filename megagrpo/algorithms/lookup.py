"""Registered parts by name, or by the place of a user's code: `FILE.py:function`,
`package.module:function`.
"""

from typing import Any, Protocol, TypeVar

from megagrpo.callables import is_callable_spec, load_callable
from megagrpo.errors import UserError
from megagrpo.registry import Registry


class HasFunction(Protocol):
    """A registered entry: it wraps the function that was decorated."""

    @property
    def function(self) -> Any: ...


Entry = TypeVar("Entry", bound=HasFunction)


def find_entry(registry: Registry[Entry], name: str) -> Entry:
    """Return the entry called `name`; a callable's place is imported first, and its decorated function looked
    up.

    Raises:
        UserError: an unknown name (the nearest is named), code that cannot be imported, or a function that it
            does not register.
    """
    if name in registry.names() or not is_callable_spec(name):
        return registry.get(name)
    function = load_callable(name)
    for known in registry.names():
        if registry.get(known).function is function:
            return registry.get(known)
    raise UserError(
        f"{name}: the function is not registered as a {registry.kind}; decorate it "
        "(examples/custom_algorithm.py)"
    )
