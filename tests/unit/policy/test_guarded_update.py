"""What may hold a step's updates back, and whether the step can still be given up."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megagrpo.errors import StopRequested
from megagrpo.policy.actor import AppliedUpdate
from megagrpo.policy.guarded_update import GuardedUpdate
from megagrpo.policy.update import UpdateResult
from megagrpo.telemetry import names

APPLIED = AppliedUpdate(grad_norm=0.5, applied=True)
SKIPPED = AppliedUpdate(grad_norm=0.5, applied=False)


def guarded(num_updates=1, outcome=APPLIED, accepts_rewards=True, stop_if_asked=lambda: None):
    """One whose updater asks as the real one does: before a pass until an update is applied, and before each
    application.
    """

    def run(rollouts, learning_rate, before_apply, before_pass, accepts, weight_version):
        applied = []
        for number in range(num_updates):
            if not applied:
                before_pass()
            before_apply({"loss": 1.0}, None)
            accepts(0.5)
            learning_rate(number)
            applied.append(outcome)
        return UpdateResult({}, applied, trained_tokens=7)

    gate = MagicMock(metrics=dict)
    gate.accepts_rewards.return_value = accepts_rewards
    gate.count_nonfinite.side_effect = lambda before, applied: before + len(applied)
    rates = []
    updater = SimpleNamespace(
        run=run,
        update=SimpleNamespace(updates_per_step=num_updates),
        actor=SimpleNamespace(learning_rate=0.1),
    )
    update = GuardedUpdate(
        updater=updater, gate=gate, learning_rate=rates.append, stop_if_asked=stop_if_asked
    )
    return update, rates


def run(update, step=3):
    return update.run(step, None, 0.25, updates=4, nonfinite_in_a_row=1, weight_version=2)


def test_a_step_is_touched_once_an_update_is_applied():
    update, rates = guarded(num_updates=2)
    metrics, nonfinite = run(update)
    assert not update.is_step_untouched
    assert metrics["update/trained_tokens"] == 7 and metrics[names.LEARNING_RATE] == 0.1
    assert rates == [4, 5] and nonfinite == 3  # counted on from those that the run has made
    update.gate.start_step.assert_called_once_with(3)


def test_a_step_whose_updates_are_all_skipped_is_untouched():
    update, _ = guarded(outcome=SKIPPED)
    run(update)
    assert update.is_step_untouched


def test_a_step_that_the_gate_refuses_trains_nothing_and_keeps_the_count():
    update, rates = guarded(accepts_rewards=False)
    metrics, nonfinite = run(update)
    update.gate.accepts_rewards.assert_called_once_with(0.25)
    assert update.is_step_untouched and not rates and nonfinite == 1
    assert metrics["update/trained_tokens"] == 0 and names.LEARNING_RATE not in metrics


def test_a_stop_gives_a_step_up_until_its_first_update_is_applied():
    """Asked before the first pass and the first application, then no more: the step is trained to its end."""
    asked = []
    update, _ = guarded(num_updates=3, stop_if_asked=lambda: asked.append(update.is_step_untouched))
    run(update)
    assert asked == [True, True]


def test_a_stop_before_the_first_update_leaves_the_step_untouched():
    def stop():
        raise StopRequested

    update, _ = guarded(stop_if_asked=stop)
    with pytest.raises(StopRequested):
        run(update)
    assert update.is_step_untouched
