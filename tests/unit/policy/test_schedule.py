"""The learning-rate schedule at its corners."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megagrpo.config.training_sections import OptimizerConfig
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


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_every_update_has_the_learning_rate_of_megatrons_scheduler(schedule, warmup, fraction):
    """The peer counts steps from 1 in its warm-up and from 0 after it, so update u of ours is its state after
    u + 1 steps while warming up, after u steps beyond.
    """
    config = OptimizerConfig(lr=2e-3, schedule=schedule, warmup_steps=warmup, min_lr_fraction=fraction)
    group = {"lr": 0.0, "weight_decay": 0.0}
    peer = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * fraction,
        lr_warmup_steps=warmup,
        lr_decay_steps=20,
        lr_decay_style=schedule,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )
    for update in range(25):
        peer.num_steps = update + 1 if update < warmup else update
        assert learning_rate(config, update, 20) == pytest.approx(peer.get_lr(group), rel=1e-12), update
