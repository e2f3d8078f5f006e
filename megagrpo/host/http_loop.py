"""JSON over HTTP/1.1 in an event loop that runs something else too: POST and GET with a Content-Length,
connections kept alive.

Runs inside engine processes: standard library only. Enough for one client that is ours, on the loopback
interface; no more.
"""

import asyncio
import http
import json
import socket
from collections.abc import Awaitable, Callable

Handler = Callable[[bytes], Awaitable[bytes]]
"""Takes the body of a request, returns that of the answer: JSON, or nothing. A `RefusedError` is answered
with 400.
"""

_MAX_HEADER_BYTES = 64 * 2**10


class RefusedError(Exception):
    """The request can't be followed, for the reason that it gives."""


def bind(host: str, port: int) -> socket.socket:
    """Take a port, so that a port that is taken is found before anything is loaded; nobody is answered
    yet. Raises OSError.
    """
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((host, port))
    return taken


async def serve(taken: socket.socket, routes: dict[tuple[str, str], Handler]) -> None:
    """Answer requests at a port that was taken, for ever.

    Args:
        routes: (method, path) -> what answers it.
    """

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _answer_one(reader, writer, routes):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, sock=taken, limit=_MAX_HEADER_BYTES)
    await server.serve_forever()


async def _answer_one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, routes: dict[tuple[str, str], Handler]
) -> bool:
    """Read and answer one request; say whether another may come."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ", 2)
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    handler = routes.get((method, target.partition("?")[0]))
    if handler is None:
        status, answer = http.HTTPStatus.NOT_FOUND, _error(f"{method} {target}: no such route")
    else:
        try:
            status, answer = http.HTTPStatus.OK, await handler(body)
        except RefusedError as refusal:
            status, answer = http.HTTPStatus.BAD_REQUEST, _error(str(refusal))
        except Exception as error:  # sent to the client; the other requests go on
            status, answer = http.HTTPStatus.INTERNAL_SERVER_ERROR, _error(f"{type(error).__name__}: {error}")
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(answer)}",
        "",
        "",
    ]
    writer.write("\r\n".join(lines).encode() + answer)
    await writer.drain()
    return headers.get("connection", "").lower() != "close"


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
