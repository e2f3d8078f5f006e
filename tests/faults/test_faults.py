"""A short selection of the harness's faults; `make test-faults` runs all of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import SHORT
from fleet import Fleet
from harness import run_chain

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    fleet = Fleet(folder)
    try:
        return {result.fault: result for result in run_chain(SHORT, fleet, folder)}
    finally:
        fleet.close()


@pytest.mark.parametrize("name", [f"{SHORT.name}: {case.name}" for cases in SHORT.launches for case in cases])
def test_the_run_goes_on_bit_equal_after(results, name):
    result = results[name]
    assert not result.problems, "\n".join(result.problems)
    assert result.bit_equal and result.steps_lost <= 1
