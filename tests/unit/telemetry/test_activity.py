"""What a person sees while a run works: what is built, how far it is, what is left, a line a minute."""

import io
import time

import pytest

from megagrpo.telemetry.activity import Activity, format_seconds
from megagrpo.telemetry.display import Display


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_what_is_built_is_told_with_its_own_time_and_that_since_the_start(clock):
    activity = Activity(40, clock)
    clock.now += 4
    activity.build("the actor")
    clock.now += 3
    assert activity.describe() == "building the actor: 3 s, 7 s since the start"


def test_an_engine_that_starts_shows_the_last_line_of_its_log(clock, tmp_path):
    log = tmp_path / "vllm_0.log"
    activity = Activity(40, clock)
    activity.build("the rollout engine (vllm)", log)
    assert activity.describe().endswith(f"log {log}: ")  # it is not there yet
    log.write_text("INFO first\nINFO Loading weights\n\n")
    assert activity.describe().endswith(f"log {log}: INFO Loading weights")


def test_a_phase_shows_its_counts_their_rate_and_what_is_left_by_the_slowest_of_them(clock):
    activity = Activity(40, clock)
    activity.step = 2
    activity.enter("rollout")
    clock.now += 10
    activity.count("completions", 128, 256)
    activity.count("scored", 64, 256)
    activity.count("tok", 5000, None)
    # 64 of 256 in 10 s: the other 192 take 30 s
    assert activity.describe() == (
        "step 3/40  rollout 10 s: 128/256 completions, 64/256 scored, 500 tok/s, 30 s left"
    )


def test_a_phase_without_counts_is_as_long_as_the_last_time(clock):
    activity = Activity(40, clock)
    activity.enter("checkpoint")
    activity.leave("checkpoint", 12.0)
    activity.enter("checkpoint")
    clock.now += 5
    assert activity.describe() == "step 1/40  checkpoint 5 s: 7 s left"


def test_a_phase_inside_another_is_the_one_that_is_shown(clock):
    activity = Activity(40, clock)
    activity.enter("publish")
    activity.enter("engine_start")
    assert "engine_start" in activity.describe()
    activity.leave("engine_start", 1.0)
    assert "publish" in activity.describe()


def test_the_run_is_as_long_as_its_steps_so_far_evaluations_included(clock):
    activity = Activity(40, clock)
    activity.finish_step(10)  # resumed
    assert activity.run_seconds_left(clock.now) is None
    clock.now += 60
    activity.finish_step(12)
    clock.now += 5
    # 28 steps of 30 s, of which 5 s are gone
    assert activity.run_seconds_left(clock.now) == 28 * 30 - 5


def test_a_rolled_back_run_counts_from_the_step_it_goes_on_from(clock):
    activity = Activity(40, clock)
    activity.finish_step(10)
    activity.finish_step(8)
    clock.now += 20
    activity.finish_step(10)
    assert activity.run_seconds_left(clock.now) == 30 * 10


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.9, "42 s"), (250, "4 min 10 s"), (11_130, "3 h 05 min"), (0, "0 s")]
)
def test_times_are_said_as_a_person_says_them(seconds, text):
    assert format_seconds(seconds) == text


def test_without_a_terminal_a_silent_run_gives_a_sign_of_life():
    screen = io.StringIO()
    display = Display(Activity(40), file=screen, heartbeat_seconds=0.01)
    deadline = time.monotonic() + 30
    while "building the run" not in screen.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    display.close()
    assert screen.getvalue().startswith("... building the run: ")
