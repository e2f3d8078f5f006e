"""The learning-rate schedule at its corners."""

import pytest

from megagrpo.config.schema import OptimizerConfig
from megagrpo.policy.schedule import learning_rate


def test_warm_up_is_linear_and_never_zero():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, update, 10) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("schedule", "half"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_ends_at_the_fraction(schedule, half):
    config = OptimizerConfig(lr=1.0, schedule=schedule, min_lr_fraction=0.1)
    assert learning_rate(config, 0, 10) == 1.0
    assert learning_rate(config, 5, 10) == pytest.approx(half)
    assert learning_rate(config, 10, 10) == pytest.approx(0.1)
    assert learning_rate(config, 25, 10) == pytest.approx(0.1)
