"""The kernels that stand in for compiled ones, by name."""

from collections.abc import Callable

KERNELS: dict[str, Callable] = {}


def kernel(function: Callable) -> Callable:
    """Register `function` under the name of the compiled kernel that it stands in for."""
    KERNELS[function.__name__] = function
    return function
