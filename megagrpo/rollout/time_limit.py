"""A limit on the time that code of others may take in this thread: a chat template that loops for ever."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _TimeIsUpError(BaseException):
    """Not an Exception: what it ends may not take it for one of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the body takes longer than `seconds`.

    By SIGALRM, which costs microseconds: in the main thread alone, without limit in others. Python code is
    ended; one long operation in C is ended after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def strike(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUpError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, strike)
    others, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeIsUpError:
        raise TimeoutError(f"took more than {seconds:g} s") from None
    finally:
        left = max(others - (time.monotonic() - started), 1e-3) if others else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)  # a timer that ran before runs on
