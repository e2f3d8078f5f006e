"""Code of others is ended when its time is up, and the process is as before."""

import signal
import threading
import time

import pytest

from megagrpo.rollout.time_limit import time_limit


def loop(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            for _ in range(1000):
                pass
        except Exception:  # what is ended may not swallow the end
            continue


def test_what_takes_too_long_is_ended_and_what_does_not_is_left_alone():
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"took more than 0\.05 s"), time_limit(0.05):
        loop(30.0)
    with time_limit(30.0):
        pass
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_timer_that_ran_before_runs_on():
    struck = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: struck.append(number))
    try:
        test_runners_own = signal.setitimer(signal.ITIMER_REAL, 0.2)
        with time_limit(30.0):
            loop(0.3)
        loop(0.2)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *test_runners_own)
    assert struck == [signal.SIGALRM]


def test_another_thread_than_the_main_one_has_no_limit():
    ended = []

    def work():
        with time_limit(0.01):
            loop(0.1)
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10.0)
    assert ended == [True]
