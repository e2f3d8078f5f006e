"""One worker process, seen from the pool: start, send, receive, kill."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megagrpo.rewards.frames import FrameReader, write_frame
from megagrpo.rewards.messages import Reply, Request, Setup

_PACKAGE_ROOT = str(Path(__file__).parents[2])
# A scorer is one of many processes on the machine: its BLAS must not take all cores.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerProcess:
    """A running worker. It leads a session of its own, so that a kill takes the processes with it that
    reward code started.
    """

    def __init__(self) -> None:
        """Start the process; the first message to it is its Setup, and the first reply Ready or Refused."""
        environment = {**os.environ, **_THREADS}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [_PACKAGE_ROOT, environment.get("PYTHONPATH")])
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megagrpo.rewards.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self._reader = FrameReader(self.fileno())
        self.deadline = 0.0  # time.monotonic() by which the reply must be here

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a reply, or with the end of the process."""
        return self._replies.fileno()

    def send(self, message: Setup | Request, seconds: float) -> None:
        """Send a message whose reply may take `seconds`; a process that is gone raises BrokenPipeError
        here or EOFError at `receive`.
        """
        self.deadline = time.monotonic() + seconds
        write_frame(self._requests.fileno(), message)

    def receive(self) -> Reply | None:
        """Return the reply, or None while it is incomplete; call it when `fileno()` is readable. EOFError:
        the process is gone.
        """
        replies = self._reader.read()
        return replies[0] if replies else None

    def kill(self) -> int:
        """Kill the process and all of its session, reap it, and return its exit status (negative: the
        signal that ended it).
        """
        with contextlib.suppress(ProcessLookupError):  # no process of the session is left
            # before `wait`: until it is reaped, its id can't belong to anybody else
            os.killpg(self.pid, signal.SIGKILL)
        self._requests.close()
        self._replies.close()
        return self._process.wait()
