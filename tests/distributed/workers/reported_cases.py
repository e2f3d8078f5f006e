"""One line of output for each case of a worker, which the launching test turns into one test id a case."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "CASE"


@contextmanager
def reported_case(name: str) -> Iterator[None]:
    """Print that a case passed (the first rank says it for all), or on which rank it failed and with what.

    A failure ends the launch: the other ranks may wait in a collective of the failed case.
    """
    try:
        yield
    except BaseException as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"\n{PREFIX} {name} | failed on rank {os.environ['RANK']}: {cause}", flush=True)
        raise
    if os.environ["RANK"] == "0":
        print(f"\n{PREFIX} {name} | passed", flush=True)  # a line of its own, whatever came before
