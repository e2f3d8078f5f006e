"""Length-prefixed messages over a socket. Bytes only: what they mean is `messages.py`'s."""

import os
import struct

_LENGTH = struct.Struct("<I")
MAX_REQUEST_BYTES = 1 << 28  # a group of 64 completions of 128k tokens is 150 MiB
MAX_REPLY_BYTES = 1 << 24  # a number and a few parts for each completion, or one message


class MalformedFrameError(Exception):
    """The other side announced more than is allowed."""


def pack_frame(body: bytes) -> bytes:
    """Return `body` with its length in front."""
    return _LENGTH.pack(len(body)) + body


def write_frame(descriptor: int, body: bytes) -> None:
    """Write one message, blocking; raises BrokenPipeError where the other side is gone."""
    view = memoryview(pack_frame(body))
    while view:
        view = view[os.write(descriptor, view) :]


def read_frame(descriptor: int) -> bytes:
    """Read one request, blocking; raises EOFError where the other side is gone."""
    reader = FrameReader(descriptor, MAX_REQUEST_BYTES)
    while not (messages := reader.read()):
        pass
    return messages[0]


class FrameReader:
    """Assemble messages from whatever a descriptor has to give: one `os.read` per call, so it blocks only
    where nothing is there.
    """

    def __init__(self, descriptor: int, max_bytes: int):
        self._descriptor, self._max_bytes = descriptor, max_bytes
        self._buffer = bytearray()

    def read(self) -> list[bytes]:
        """Return the messages that one read completes, maybe none.

        Raises:
            EOFError: the other side is gone.
            MalformedFrameError: a message is announced that is longer than `max_bytes`.
        """
        try:
            chunk = os.read(self._descriptor, 1 << 16)
        except ConnectionResetError:  # the other side ended with bytes unread
            chunk = b""
        if not chunk:
            raise EOFError
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._buffer)[0]
            if length > self._max_bytes:
                raise MalformedFrameError(f"{length} bytes are announced, {self._max_bytes} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages
