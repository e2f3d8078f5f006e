"""Length-prefixed pickles over a pipe: what the pool and its workers say to each other."""

import os
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def write_frame(descriptor: int, message: Any) -> None:
    """Write one message, blocking; raises BrokenPipeError where the other side is gone."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(descriptor, view) :]


def read_frame(descriptor: int) -> Any:
    """Read one message, blocking; raises EOFError where the other side is gone."""
    reader = FrameReader(descriptor)
    while not (messages := reader.read()):
        pass
    return messages[0]


class FrameReader:
    """Assemble messages from whatever a pipe has to give: one `os.read` per call, so it blocks only where
    nothing is there.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._buffer = bytearray()

    def read(self) -> list[Any]:
        """Return the messages that one read completes, maybe none; raises EOFError where the other side is
        gone.
        """
        chunk = os.read(self._descriptor, 1 << 16)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages
