"""One worker process, seen from the pool: start, send, receive, kill."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from megagrpo.rewards.frames import MAX_REPLY_BYTES, FrameReader, MalformedFrameError, pack_frame
from megagrpo.rewards.isolation import allowed_environment
from megagrpo.rewards.messages import MAX_ANSWER_CHARACTERS, Failed, Ready, Refused, Reply, Scores

_PACKAGE_ROOT = str(Path(__file__).parents[2])
# the keeper kills its children within 5 s; one that does not answer was stopped or killed by reward code
_KEEPER_SECONDS = 7.0


class MalformedReplyError(Exception):
    """A worker sent something that is no reply, or a reply to no request."""


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may use and reach."""

    memory_bytes: int
    network: bool = True
    environment: Sequence[str] = ()  # names of variables beside `isolation.ENVIRONMENT`


class WorkerProcess:
    """A running worker and its keeper, which ends all that reward code started."""

    def __init__(self, limits: WorkerLimits) -> None:
        """Start the process; the first message to it is its Setup, and the first reply Ready or Refused."""
        environment = allowed_environment(limits.environment)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [_PACKAGE_ROOT, environment.get("PYTHONPATH")])
        )
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        arguments = [str(os.getpid()), str(limits.memory_bytes), str(int(limits.network))]
        with theirs:
            self._process = subprocess.Popen(
                # -P: no module of the working directory comes before the standard library's
                [sys.executable, "-P", "-m", "megagrpo.rewards.keeper", *arguments],
                stdin=theirs.fileno(),
                stdout=2,
                env=environment,
                start_new_session=True,
            )
        self._reader = FrameReader(self.fileno(), MAX_REPLY_BYTES)
        self._outgoing = memoryview(b"")
        self.deadline = 0.0  # time.monotonic() by which the reply must be here
        self.started = 0.0  # when the message was sent

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a reply, or with the end of the process."""
        return self._socket.fileno()

    def send(self, message: bytes, seconds: float) -> None:
        """Begin to send a message whose reply may take `seconds`, the sending included.

        A process that is gone raises OSError here or EOFError at `receive`.
        """
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self._outgoing = memoryview(pack_frame(message))
        self.send_more()

    def send_more(self) -> None:
        """Send as much as the process takes without waiting."""
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]

    @property
    def is_sending(self) -> bool:
        """Whether a part of the message is left: `send_more` when `fileno()` is writable."""
        return bool(self._outgoing)

    def receive(self) -> Reply | None:
        """Return the reply, or None while it is incomplete; call it when `fileno()` is readable.

        Raises:
            EOFError: the process is gone.
            MalformedReplyError: it sent what is no reply, or more than one.
        """
        try:
            replies = self._reader.read()
            if len(replies) > 1:
                raise MalformedReplyError("more than one reply to one request")
            return decode_reply(replies[0]) if replies else None
        except (MalformedFrameError, ValueError) as error:
            raise MalformedReplyError(str(error)) from error

    def kill(self) -> int:
        """End the process and all that it started, reap it, and return its exit status (negative: the signal
        that ended it).
        """
        self._socket.close()
        self._process.terminate()
        try:
            return self._process.wait(_KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()


MAX_MESSAGE_CHARACTERS = 2000
_READER: TypeAdapter[Reply] = TypeAdapter(
    Annotated[Ready | Scores | Failed | Refused, Field(discriminator="kind")]
)


def decode_reply(body: bytes) -> Reply:
    """Return the reply, its messages on one line and of bounded length.

    Raises:
        ValueError: it is no reply: not JSON, another field, another type, a number that is not finite.
    """
    try:
        reply = _READER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    if isinstance(reply, Scores):
        for score in reply.scores:
            if score.answer is not None and len(score.answer) > MAX_ANSWER_CHARACTERS:
                raise ValueError(f"scores: an answer is longer than {MAX_ANSWER_CHARACTERS} characters")
    if isinstance(reply, Failed):
        return Failed(reply.outcome, _one_line(reply.detail))
    return Refused(_one_line(reply.message)) if isinstance(reply, Refused) else reply


def _one_line(text: str) -> str:
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())[:MAX_MESSAGE_CHARACTERS]
