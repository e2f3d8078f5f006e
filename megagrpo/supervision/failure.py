"""What went wrong on one rank, and where it is told: to the other ranks, once on the screen, by each rank in
the run folder, and in a line to the launcher.
"""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megagrpo.errors import ForeignError, RelayedError, UserError
from megagrpo.supervision import exit_codes
from megagrpo.supervision.redaction import redact

# How torch.distributed words the loss of a peer. There is one exception type for all of its errors, so only
# the words tell.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Socket closed",
    "Failed to recv",
    "remote process exited or there was a network error",
    "remote process exiting prematurely",
    "NCCL communicator was aborted",
    "connection was likely closed",
    "connectFullMesh failed",
)


@dataclass(frozen=True)
class Failure:
    """One rank's failure, and where the rank was."""

    rank: int
    phase: str
    step: int | None  # None before the first step
    message: str  # `ZeroDivisionError: division by zero`
    traceback: str = ""
    kind: str = (
        "error"  # error, foreign (its line says all), user (a UserError), died (without a word), stalled
    )
    time: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def place(self) -> str:
        """Return e.g. `step 3, phase update`."""
        return f"phase {self.phase}" if self.step is None else f"step {self.step}, phase {self.phase}"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the rank that met it."""
        return exit_codes.USER_ERROR if self.kind == "user" else exit_codes.FAILED

    @property
    def peer_exit_code(self) -> int:
        """Return the exit code of the other ranks."""
        return exit_codes.USER_ERROR if self.kind == "user" else exit_codes.PEER_FAILED

    def tell(self) -> str:
        """Return the lines that the user gets to see."""
        return replace(self, traceback="").describe() if self.kind == "foreign" else self.describe()

    def describe(self) -> str:
        """Return all there is to tell. A user's mistake is told as it is: it is the same on all ranks."""
        if self.kind == "user":
            return self.message
        lines = [f"rank {self.rank} failed in {self.place}: {self.message}"]
        if self.kind == "died":
            lines = [f"rank {self.rank} died in {self.place}: {self.message}"]
        if self.kind == "stalled":
            lines = [f"rank {self.rank} stalled in {self.place}: {self.message}"]
        return "\n".join([*lines, *([self.traceback.rstrip()] if self.traceback else [])])

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Failure":
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def build_failure(error: BaseException, rank: int, phase: str, step: int | None) -> Failure:
    """Build the failure that an exception of this rank is."""
    if isinstance(error, UserError):
        return Failure(rank, phase, step, redact(str(error)), kind="user")
    if isinstance(error, RelayedError) and error.__cause__ is not None:
        error = error.__cause__
    message = f"{type(error).__name__}: {error}".strip()
    trace = "".join(traceback.format_exception(error))
    kind = "foreign" if _is_foreign(error) else "error"
    return Failure(rank, phase, step, redact(message), redact(trace), kind)


def _is_foreign(error: BaseException) -> bool:
    """Return whether another program caused an exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, ForeignError)


def is_echo(error: BaseException) -> bool:
    """Return whether an exception only echoes another rank's failure: it was relayed, or a collective or the
    store lost its peer.
    """
    if isinstance(error, RelayedError):
        return error.__cause__ is None
    text = str(error)
    return isinstance(error, (RuntimeError, ConnectionError)) and any(echo in text for echo in _ECHOES)


def append_failure(folder: Path, failure: Failure) -> Path:
    """Append to `folder/rank_0001.txt` (made where missing) and return the path: restarts add to what is
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{failure.rank:04d}.txt"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{stamp} {failure.describe()}\n\n")
    return path


def say(text: str) -> None:
    """Print on standard error, which may be a file on a full disk: that must not keep the thread from ending
    the rank.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def keep(run_dir: Path, failure: Failure) -> None:
    """Add a failure to its rank's file in `errors/`."""
    try:
        append_failure(run_dir / "errors", failure)
    except OSError as error:  # the storage may be the cause: what is told must not be lost with it
        say(f"rank {failure.rank}: {run_dir / 'errors'}: {error}; {failure.describe()}")


def tell(run_dir: Path, failure: Failure) -> None:
    """Print the first failure of all ranks."""
    text = failure.tell()
    if failure.kind != "user" and (run_dir / "errors").is_dir():
        text += f"\nevery rank's end: {run_dir / 'errors'}"
    say(text)
    note_for_launcher(text if failure.kind == "user" else text.splitlines()[0])


def tell_stall(run_dir: Path, failure: Failure, silent: Sequence[int]) -> None:
    """Print and keep a stall, with the ranks that wrote no stacks."""
    keep(run_dir, failure)
    lines = [failure.describe(), f"Python stacks of the ranks: {run_dir / 'stacks'}"]
    if silent:
        lines.append(f"without an answer (frozen, or its host is lost): rank {', '.join(map(str, silent))}")
    say("\n".join(lines))
    note_for_launcher(lines[0])


def note_for_launcher(text: str) -> None:
    """Leave the cause for torchrun's own report, which comes last on the screen and otherwise advises to turn
    tracebacks on.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        note = json.dumps({"message": {"message": text, "extraInfo": extra}})
        # in a temporary folder, which may be full: that must not end the thread which ends a stalled rank
        with contextlib.suppress(OSError):
            Path(path).write_text(note, encoding="utf-8")
