"""An engine sleeps during updates where that is wanted, and wakes whatever happens."""

import pytest

from megagrpo.engines.base import EngineError, EngineHealth, asleep


class Engine:
    def __init__(self):
        self.calls, self.state = [], "serving"

    def sleep(self):
        self._call("sleep", "asleep")

    def wake(self):
        self._call("wake", "serving")

    def _call(self, name, state):
        self.calls.append(name)
        if self.state == "dead":
            raise EngineError("the rollout engine is dead")
        self.state = state

    def health(self):
        return EngineHealth(self.state == "serving", self.state, 0)


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


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_dead_engine_ends_no_update(when):
    """It may belong to one rank alone: what is raised there would leave the others in the update's
    collectives.
    """
    engine = Engine()
    engine.state = "dead" if when == "before" else "serving"
    with asleep(engine, wanted=True):
        engine.state = "dead"
        engine.calls.append("update")
    assert engine.calls == ["sleep", "update"]


def test_what_a_living_engine_refuses_is_raised():
    engine = Engine()
    engine.sleep = lambda: (_ for _ in ()).throw(EngineError("an update is open"))
    with pytest.raises(EngineError, match="an update is open"), asleep(engine, wanted=True):
        pass
