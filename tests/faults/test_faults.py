"""A short selection of the harness's faults; `make test-faults` runs all of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from answer_cases import SHORT_ANSWERS
from cases import SHORT, SHORT_BACKGROUND
from engine_cases import SHORT_ENGINES
from fleet import Fleet
from harness import run_chain

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function: chain -> its results by fault; each chain runs once."""
    folder, done = tmp_path_factory.mktemp("faults"), {}
    fleet = Fleet(folder)

    def results(chain):
        if chain.name not in done:
            done[chain.name] = {result.fault: result for result in run_chain(chain, fleet, folder)}
        return done[chain.name]

    yield results
    fleet.close()


def names(chain):
    return [f"{chain.name}: {case.name}" for cases in chain.launches for case in cases]


def assert_bit_equal(result):
    assert not result.problems, "\n".join(result.problems)
    assert result.bit_equal and result.steps_lost <= 1


@pytest.mark.parametrize("name", names(SHORT))
def test_the_run_goes_on_bit_equal_after(results, name):
    assert_bit_equal(results(SHORT)[name])


@pytest.mark.parametrize("name", names(SHORT_BACKGROUND))
def test_a_save_under_way_is_whole_after(results, name):
    """One rank of two fails by itself, or both alike; the step before was still being written."""
    assert_bit_equal(results(SHORT_BACKGROUND)[name])


@pytest.mark.parametrize("name", names(SHORT_ANSWERS))
def test_a_run_loses_nothing_by_wrong_answers_of_a_server(results, name):
    """Once: it is asked again. For ever: one line, and the last finished step is saved."""
    assert_bit_equal(results(SHORT_ANSWERS)[name])


@pytest.mark.engines
@pytest.mark.parametrize("name", names(SHORT_ENGINES))
def test_a_run_with_engine_servers_goes_on_bit_equal_after(results, name):
    """One of two servers dies, comes back, and is all that is left when the other one dies."""
    assert_bit_equal(results(SHORT_ENGINES)[name])
