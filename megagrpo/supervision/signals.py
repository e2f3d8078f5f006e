"""Signals reach a thread of ours at once, also while the main thread is inside a collective."""

import os
import select
import signal

# the launcher's or Slurm's, Slurm's --signal, Ctrl-C
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalPipe:
    """Receives STOP_SIGNALS of this process and hands them to whoever waits.

    A Python handler runs only when the main thread is back in Python, which a hanging collective never is.
    The C half of a handler writes the signal's number to a descriptor right away: that is what `wait` reads.
    """

    def __init__(self) -> None:
        """Install the handlers; main thread only."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Return the signals that came, after at most `seconds`."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        if not ready:
            return []
        return [signal.Signals(number) for number in os.read(self._read, 64) if number in STOP_SIGNALS]

    def close(self) -> None:
        """Put the handlers back; main thread only. Nobody may be in `wait`."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
