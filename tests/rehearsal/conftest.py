"""One launch of a worker serves all tests of its cases."""

import functools
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "distributed")]


@pytest.fixture(scope="session")
def results_of():
    """A function (worker, ranks=1, **environment) -> results of its cases; each launch happens once."""
    from rehearse import rehearse

    return functools.cache(rehearse)


@pytest.fixture
def transformer_engine():
    """Skip, with the reason, where Transformer Engine's Python code has not been fetched."""
    from te import install

    if reason := install.missing():
        pytest.skip(reason)
