"""The points that tests/faults breaks are there: a function that moved would end all of its launches."""

import importlib
import sys
from functools import reduce
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from inject import FUNCTIONS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_faults_are_injected_into_is_there(name):
    module, _, path = FUNCTIONS[name].partition(":")
    assert callable(reduce(getattr, path.split("."), importlib.import_module(module)))
