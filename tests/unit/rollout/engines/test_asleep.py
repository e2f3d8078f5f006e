"""An engine sleeps during updates where that is wanted, and wakes whatever happens."""

import pytest

from megagrpo.rollout.engines.base import asleep


class Engine:
    def __init__(self):
        self.calls = []

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")


def test_an_engine_sleeps_inside_only_and_wakes_after_an_error_too():
    engine = Engine()
    with asleep(engine, wanted=True):
        engine.calls.append("update")
    with pytest.raises(ValueError, match="a spike"), asleep(engine, wanted=True):
        raise ValueError("a spike")
    assert engine.calls == ["sleep", "update", "wake", "sleep", "wake"]


def test_an_engine_that_need_not_sleep_is_left_alone():
    engine = Engine()
    with asleep(engine, wanted=False):
        pass
    assert engine.calls == []
