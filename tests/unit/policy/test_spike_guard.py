"""What is a spike: judged against the median of the values before it, never of itself."""

import math

import pytest

from megagrpo.config.training_sections import SpikesConfig
from megagrpo.policy.spikes import SpikeGuard


def guard(**settings):
    return SpikeGuard(SpikesConfig(window=4, **settings))


def test_nothing_is_judged_before_half_a_window():
    judge = guard(grad_norm_factor=2)
    assert judge.find_in_update(0.0, 1.0) is None and judge.find_in_update(0.0, 100.0) is None
    assert judge.find_in_update(0.0, 102.0) == (
        "gradient norm 102 is over 2 x the running median 50.5 (spikes.grad_norm_factor)"
    )


def test_a_loss_is_judged_by_its_size_and_only_over_one():
    judge = guard(loss_factor=10)
    for loss in (1e-8, -1e-8):
        judge.find_in_update(loss, 1.0)
    assert judge.find_in_update(0.9, 1.0) is None  # on-policy losses are rounding noise around 0
    assert "loss 3 is over 10 x the running median 1e-08 (spikes.loss_factor)" in judge.find_in_update(
        -3.0, 1.0
    )


def test_a_reward_collapses_below_a_fraction_of_a_positive_median():
    judge = guard(reward_fraction=0.5)
    for reward in (0.8, 0.6):
        assert judge.find_in_rewards(reward) is None
    assert judge.find_in_rewards(0.36) is None
    assert "mean reward 0.1 is under 0.5 x the running median 0.6" in judge.find_in_rewards(0.1)
    negative = guard(reward_fraction=0.5)
    assert [negative.find_in_rewards(reward) for reward in (-1.0, -1.0, -9.0)] == [None] * 3


def test_a_new_level_is_learned():
    judge = guard(grad_norm_factor=3)
    found = [judge.find_in_update(0.0, norm) is not None for norm in [1.0, 1.0, 10.0, 10.0, 10.0, 10.0]]
    assert found == [False, False, True, True, False, False]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_spike_and_spoils_no_median(value):
    judge = guard(grad_norm_factor=2, loss_factor=2, reward_fraction=0.5)
    for _ in range(4):
        assert judge.find_in_update(value, value) is None and judge.find_in_rewards(value) is None
    assert judge.state() == {}


def test_a_resumed_guard_goes_on_with_the_same_medians():
    first = guard(grad_norm_factor=2)
    for norm in (1.0, 2.0, 3.0):
        first.find_in_update(0.0, norm)
    second = guard(grad_norm_factor=2)
    second.load_state(first.state())
    assert second.find_in_update(0.0, 4.1) == first.find_in_update(0.0, 4.1) is not None
