"""Signals reach a thread of ours at once, also while the main thread is inside a collective. No torch."""

import ctypes
import os
import select
import signal
import sys

# the launcher's or Slurm's, Slurm's --signal, Ctrl-C
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# what the kernel sends a rank whose launcher has ended; one that nobody else sends, and that ends a process
LAUNCHER_ENDED = signal.SIGRTMIN if sys.platform == "linux" else None
LAUNCHER_PID = "MEGAGRPO_LAUNCHER_PID"  # environment variable of the ranks
_PR_SET_PDEATHSIG = 1


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return what asks this process to save and stop: STOP_SIGNALS, and the end of its terminal unless
    nohup has asked to outlive that.
    """
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return STOP_SIGNALS if outlives else (*STOP_SIGNALS, signal.SIGHUP)


def end_with_launcher() -> None:
    """Let this rank end with its launcher, and by every signal at once, until `SignalPipe` takes over.

    To be called first: a rank that is being started has nothing to save, and while it waits in native code
    for others that will never come no handler of Python's would run.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as the launcher has started it
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    if LAUNCHER_ENDED is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, LAUNCHER_ENDED)
    if os.getppid() != launcher or _is_left_by_torchrun():
        os.kill(os.getpid(), signal.SIGTERM)  # it ended before that


def _is_left_by_torchrun() -> bool:
    """Say whether torchrun, which does not tell its process id, has ended before this rank's first line.

    It starts each rank as the leader of a session and is a Python program: where a leader's parent is none,
    whoever adopts orphans is its parent now.
    """
    if LAUNCHER_PID in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return False
    try:
        program = os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe"))
    except OSError:  # another user's, as the first process of a machine is
        program = ""
    return os.getsid(0) == os.getpid() and not program.startswith(("python", "pypy"))


class SignalPipe:
    """Receives `stop_signals` and LAUNCHER_ENDED of this process and hands them to whoever waits.

    A Python handler runs only when the main thread is back in Python, which a hanging collective never is.
    The C half of a handler writes the signal's number to a descriptor right away: that is what `wait` reads.
    """

    def __init__(self) -> None:
        """Install the handlers; main thread only."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        numbers = (*stop_signals(), *((LAUNCHER_ENDED,) if LAUNCHER_ENDED is not None else ()))
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Return the signals that came, after at most `seconds`."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        if not ready:
            return []
        return [signal.Signals(number) for number in os.read(self._read, 64) if number in self._before]

    def close(self) -> None:
        """Put the handlers back; main thread only. Nobody may be in `wait`."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
