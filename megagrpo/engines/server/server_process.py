"""A server that is a child of this process: started, watched, ended, and never left behind."""

import contextlib
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megagrpo.errors import UserError
from megagrpo.supervision.orphaned_files import Ledger
from megagrpo.wire.shared_files import LEDGER

# The last line of a traceback, whatever a logger puts before it.
_CAUSE = re.compile(r"^(?:\([^)]*\)\s*)?(?:.*\]\s)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
_PORT_TAKEN = "address already in use"
_CAUSE_CHARACTERS = 400
_POLL_SECONDS = 0.25
_LOOK_SECONDS = 1.0  # between two looks at the files that a server makes in shared memory while it starts
_LOG_TAIL_BYTES = 64 * 2**10


class ServerProcess:
    """One server process with a port of its own on this machine, in a process group of its own, writing to a
    log file.

    The child's standard input is a pipe that only this process holds: when this process ends, however it
    ends, the pipe closes, which `host/parent_watch.py` in the child answers by ending its group. So a killed
    rank leaves no server behind.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log_file: Path,
        port: int | None = None,
    ):
        """Start the server; `wait_ready` says when it serves.

        Args:
            command: the command line for a port.
            environment: of the child, on top of this process's.
            log_file: appended to, the command first.
            port: None takes a free one.
        """
        self.port = port or free_port()
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        words = list(command(self.port))
        self._files = Ledger()
        with open(log_file, "ab") as log:
            log.write(f"{shlex.join(words)}\n".encode())
            log.flush()
            self._log_start = log.tell()  # what stands before is not this server's
            self._process = subprocess.Popen(
                words,
                env={**os.environ, **environment, LEDGER: str(self._files.path)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        """Its HTTP address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is also the id of its group."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, is_ready: Callable[[], bool], timeout_seconds: float) -> None:
        """Wait until `is_ready()`.

        Raises:
            UserError: the process ended, or the time is over (it is ended then); with the reason that its log
                gives.
        """
        deadline, looked = time.monotonic() + timeout_seconds, float("-inf")
        while not is_ready():
            if time.monotonic() - looked > _LOOK_SECONDS:
                self._files.note(self.pid)
                looked = time.monotonic()
            if not self.is_alive():
                self.stop(0)  # what is left of its group
                raise UserError(
                    f"the server ended with code {self._process.returncode} while it started: "
                    f"{self.last_words()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise UserError(
                    "the server did not serve within engine.server.start_timeout_seconds = "
                    f"{timeout_seconds:g}: {self.last_words()}"
                )
            time.sleep(_POLL_SECONDS)
        self._files.note(self.pid)

    def port_was_taken(self) -> bool:
        """Say whether the process ended because another one had its port."""
        return not self.is_alive() and _PORT_TAKEN in self._log_tail().lower()

    def last_words(self) -> str:
        """Return the last error in the log (its last line where there is none) and where the log is, as
        one line.
        """
        lines = [line.rstrip() for line in self._log_tail().splitlines() if line.strip()]
        places = [number for number, line in enumerate(lines) if _CAUSE.match(line)]
        said = lines[-1].strip() if lines else "it wrote nothing"
        if places and (cause := _CAUSE.match(lines[places[-1]])):
            # pydantic's first line only counts
            details = itertools.takewhile(lambda line: line[0].isspace(), lines[places[-1] + 1 :])
            said = " ".join([cause[1], *(line.strip() for line in details)])[:_CAUSE_CHARACTERS]
        return f"{said} (log: {self.log_file})"

    def describe_end(self) -> str:
        """Return how the process ended, as one line; while it runs, that it runs."""
        code = self._process.poll()
        if code is None:
            return "the server runs, but does not answer"
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the server {ended}: {self.last_words()}"

    def stop(self, grace_seconds: float = 10.0) -> None:
        """End the process and its group: asked first, killed after `grace_seconds`. What they have made in
        shared memory goes too.
        """
        self._files.note(self.pid)
        if self.is_alive() and grace_seconds > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        with contextlib.suppress(ProcessLookupError):  # everything of the group has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._files.close()
        if self._process.stdin:
            self._process.stdin.close()

    def _log_tail(self) -> str:
        with open(self.log_file, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
