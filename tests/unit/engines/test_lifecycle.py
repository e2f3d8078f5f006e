"""Which calls an engine takes in which state, and where they lead."""

import itertools

import pytest

from megagrpo.engines.base import EngineError, EngineState
from megagrpo.engines.lifecycle import TRANSITIONS, Action, EngineLifecycle

BEGIN = ("begin", 1)
OVERWRITE = ("overwrite",)
PATHS = {
    EngineState.EMPTY: [],
    EngineState.UPDATING: [BEGIN],
    EngineState.VERIFYING: [BEGIN, ("complete", 1)],
    EngineState.SERVING: [BEGIN, ("complete", 1), ("serve", 1)],
    EngineState.STALE: [BEGIN, OVERWRITE, ("abort",)],
    EngineState.ASLEEP: [("sleep",)],
    EngineState.CLOSED: [("close",)],
}
"""Calls that lead a new engine to a state."""


def lifecycle_in(state, **options):
    lifecycle = EngineLifecycle(**options)
    for name, *arguments in PATHS[state]:
        getattr(lifecycle, name)(*arguments)
    assert lifecycle.state is state
    return lifecycle


@pytest.mark.parametrize(("state", "action"), itertools.product(PATHS, Action))
def test_what_the_table_does_not_allow_is_refused_and_changes_nothing(state, action):
    lifecycle = lifecycle_in(state)
    if state in TRANSITIONS[action]:
        lifecycle.require(action)
        return
    with pytest.raises(
        EngineError, match=rf"the rollout engine is {state}|no weight update is open|still open"
    ):
        lifecycle.require(action)
    assert lifecycle.state is state


def test_every_state_but_closed_and_dead_has_a_way_out():
    allowed = set().union(*TRANSITIONS.values())
    assert set(EngineState) - allowed == {EngineState.CLOSED, EngineState.DEAD}


def test_an_aborted_update_leaves_the_old_version_until_a_tensor_was_overwritten():
    lifecycle = lifecycle_in(EngineState.SERVING)
    lifecycle.begin(2)
    lifecycle.abort()
    assert (lifecycle.state, lifecycle.version) == (EngineState.SERVING, 1)
    lifecycle.begin(2)
    lifecycle.overwrite()
    lifecycle.abort()
    assert (lifecycle.state, lifecycle.version) == (EngineState.STALE, None)
    with pytest.raises(EngineError, match="version 1 is not above version 1"):
        lifecycle.begin(1)


def test_an_engine_wakes_as_it_fell_asleep():
    for state in (EngineState.EMPTY, EngineState.SERVING, EngineState.STALE):
        lifecycle = lifecycle_in(state)
        lifecycle.sleep()
        lifecycle.wake()
        assert lifecycle.state is state


def test_a_lost_process_is_dead_until_it_is_found_again():
    loss = []
    lifecycle = lifecycle_in(EngineState.SERVING, find_loss=lambda: loss[0] if loss else None)
    loss.append("killed by SIGKILL")
    health = lifecycle.health()
    assert (health.state, health.ready, health.weight_version) == (EngineState.DEAD, False, None)
    with pytest.raises(EngineError, match="the rollout engine is dead: killed by SIGKILL"):
        lifecycle.begin(2)
    lifecycle.forget()
    loss.clear()
    assert lifecycle.state is EngineState.EMPTY
    lifecycle.begin(1)  # the version that was lost


@pytest.mark.parametrize("updates_in_place", [True, False])
def test_an_update_begins_beside_a_rollout_only_where_it_does_not_touch_the_weights_in_use(updates_in_place):
    lifecycle = lifecycle_in(EngineState.SERVING, updates_in_place=updates_in_place)
    with lifecycle.generating():
        if updates_in_place:
            with pytest.raises(EngineError, match=r"weight version 2: .* another thread"):
                lifecycle.begin(2)
            with pytest.raises(EngineError, match=r"can't sleep: .* another thread"):
                lifecycle.sleep()
            assert lifecycle.state is EngineState.SERVING
        else:
            lifecycle.begin(2)
            lifecycle.abort()
    lifecycle.begin(2)
