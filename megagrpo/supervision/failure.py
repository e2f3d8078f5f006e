"""What went wrong on one rank, as the other ranks, the screen and the run folder get to see it."""

import json
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megagrpo.errors import RelayedError, UserError
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
    kind: str = "error"  # error, user (a UserError), died (without a word), stalled
    time: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def place(self) -> str:
        """Return e.g. `step 3, phase update`."""
        return f"phase {self.phase}" if self.step is None else f"step {self.step}, phase {self.phase}"

    @property
    def peer_exit_code(self) -> int:
        """Return the code that the other ranks leave with."""
        return exit_codes.USER_ERROR if self.kind == "user" else exit_codes.PEER_FAILED

    def describe(self) -> str:
        """Return the lines that the user gets to see. A user's mistake is told as it is: it is the same on
        all ranks.
        """
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
    """Return the failure that an exception of this rank stands for."""
    if isinstance(error, UserError):
        return Failure(rank, phase, step, redact(str(error)), kind="user")
    if isinstance(error, RelayedError) and error.__cause__ is not None:
        error = error.__cause__
    message = f"{type(error).__name__}: {error}".strip()
    trace = "".join(traceback.format_exception(error))
    return Failure(rank, phase, step, redact(message), redact(trace))


def is_echo(error: BaseException) -> bool:
    """Say whether an exception is but the sound of another rank's failure: relayed, or a collective or the
    store that lost its peer.
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
