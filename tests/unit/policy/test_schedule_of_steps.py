"""The learning-rate schedule over the steps of a run, trained or not."""

import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megagrpo.config.training_sections import OptimizerConfig
from megagrpo.policy.guarded_update import GuardedUpdate
from megagrpo.policy.schedule import learning_rate
from megagrpo.policy.update import UpdateResult
from megagrpo.rollout.dynamic_sampling import SamplingCounts
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.trainer import Trainer


def test_steps_without_an_informative_group_advance_the_schedule(monkeypatch):
    """Linear to zero over 10 steps of 2 updates ends at zero, however many steps had nothing to train: with a
    count of applied updates it would end at 3e-4 * 14 / 20.
    """
    config, rates = OptimizerConfig(lr=3e-4, schedule="linear", min_lr_fraction=0.0), []
    parts = {name: MagicMock() for name in inspect.signature(Trainer.__init__).parameters if name != "self"}

    def run(rollouts, learning_rate, **options):
        rates.append([learning_rate(k) for k in range(2)])
        return UpdateResult({})  # every other step has nothing that trains

    update = GuardedUpdate(
        updater=SimpleNamespace(run=run, update=SimpleNamespace(updates_per_step=2), actor=MagicMock()),
        gate=MagicMock(metrics=dict, **{"count_nonfinite.return_value": 0}),
        learning_rate=lambda update: learning_rate(config, update, 20),
        stop_if_asked=lambda: None,
    )
    trainer = Trainer(**parts | {"update": update})
    update.gate.accepts_rewards.side_effect = lambda mean: trainer.state.step % 2 == 0
    trainer.pipeline.collect.return_value = (StepRollouts([], {}, {}), SamplingCounts(0, 0, 0, 0))
    trainer.timers.take.return_value = trainer.peaks.take.return_value = {}
    trainer.clock.run_seconds.return_value = 0.0
    for name, result in (("_conclude", None), ("_publish", {})):
        monkeypatch.setattr(trainer, name, lambda *_, result=result, **__: result)

    for _ in range(10):
        trainer._step()
    flat = [rate for step in rates for rate in step]
    expected = [3e-4 * (1 - update / 20) for step in range(0, 10, 2) for update in (2 * step, 2 * step + 1)]
    assert flat == pytest.approx(expected)
    assert learning_rate(config, trainer.state.updates, 20) == 0.0
