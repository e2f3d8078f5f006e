"""A phase's budget follows its own history, within the bounds that the user sets."""

import pytest

from megagrpo.config.run_sections import WatchdogConfig
from megagrpo.supervision import supervisor as supervisor_module
from megagrpo.supervision.supervisor import Supervisor
from megagrpo.supervision.watchdog import RECENT, PhaseBudgets


@pytest.fixture
def budgets():
    return PhaseBudgets(WatchdogConfig(factor=10, floor_seconds=5, limit_seconds=100))


def test_a_first_run_has_the_whole_limit(budgets):
    assert budgets.seconds("rollout") == 100


def test_the_budget_is_a_multiple_of_the_median_not_of_an_outlier(budgets):
    for seconds in (1.0, 2.0, 50.0):
        budgets.record("rollout", seconds)
    assert budgets.seconds("rollout") == 20.0
    assert budgets.seconds("update") == 100  # another phase's history is its own


def test_the_budget_stays_within_its_bounds(budgets):
    budgets.record("publish", 0.01)
    budgets.record("rollout", 60.0)
    assert (budgets.seconds("publish"), budgets.seconds("rollout")) == (5, 100)


def test_only_recent_durations_count(budgets):
    for seconds in [1.0] * RECENT + [3.0] * RECENT:
        budgets.record("rollout", seconds)
    assert budgets.seconds("rollout") == 30.0


def test_the_message_shows_the_arithmetic(budgets):
    budgets.record("rollout", 2.0)
    assert budgets.explain("rollout") == "20 s (watchdog: 10 x the median 2 s, within 5 to 100 s)"
    assert budgets.explain("update") == "100 s (watchdog.limit_seconds)"


def test_a_phases_clock_stands_still_while_another_runs_inside_it(tmp_path, monkeypatch):
    """An engine that has to be started anew may take longer than the rollout that waits for it ever did."""
    now, claimed = [0.0], []

    class Board:
        def claim(self, failure):
            claimed.append(failure.phase)
            return False

    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: now[0])
    supervisor = Supervisor(tmp_path, WatchdogConfig(factor=1, floor_seconds=5, limit_seconds=5))
    for at, act in (
        (0.0, lambda: supervisor.enter("rollout")),
        (4.0, lambda: supervisor.enter("engine_start")),
        (8.0, lambda: supervisor._look_for_stalls(Board())),  # 8 s of a rollout, but 4 s of each
        (8.5, lambda: supervisor.leave("engine_start", 4.5)),
        (9.0, lambda: supervisor._look_for_stalls(Board())),
    ):
        now[0] = at
        act()
    assert claimed == []
    now[0] = 10.0
    supervisor._look_for_stalls(Board())
    assert claimed == ["rollout"]
