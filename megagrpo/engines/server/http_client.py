"""JSON over HTTP to an engine server: every call has a time-out, and none outlives the server."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2 as httpx

from megagrpo.engines.base import EngineError

Call = tuple[str, Any]
"""(path, body that goes as JSON) of one POST."""

_WATCH_SECONDS = 0.25
_SETTLE_SECONDS = 1.0  # a connection breaks a moment before the process can be seen to have ended
# vLLM answers 500 once a worker is lost, and was seen to end more than a second later on busy cores
_ENDING_SECONDS = 10.0
_SERVER_ERROR = 500


class EngineUnreachable(EngineError):
    """The server does not answer: it has ended, it hangs, or it is not there."""


class EngineClient:
    """Calls one server."""

    def __init__(self, address: str, timeout_seconds: float, describe_end: Callable[[], str | None]):
        """`describe_end()` says how the server ended; None while it runs, or where that can't be known."""
        self.address = address
        self._timeout_seconds = timeout_seconds
        self._describe_end = describe_end
        self._client = httpx.Client(base_url=address, timeout=timeout_seconds, trust_env=False)

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Send `body` as JSON and return the answer's JSON (None where it has none).

        Raises:
            EngineUnreachable: no answer, for the reason that it gives.
            EngineError: the server refused, with what it said.
        """
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            time.sleep(_SETTLE_SECONDS)
            raise self._unreachable(path, error) from None
        if response.status_code >= _SERVER_ERROR:
            deadline = time.monotonic() + _ENDING_SECONDS
            while not self._describe_end() and time.monotonic() < deadline:
                time.sleep(_WATCH_SECONDS)
        return self._read(path, response)

    def call_all(
        self,
        calls: Sequence[Call],
        on_answer: Callable[[int, Any], None],
        max_pending: int,
        is_aborted: Callable[[], bool],
        abort_calls: Sequence[Call],
    ) -> None:
        """Send many requests at once and wait for all answers.

        The time-out counts from the last answer to any of them, so a long queue is none; the server's end is
        noticed at once.

        Args:
            on_answer: gets the number of a call and its answer, one at a time as they come; None where an
                abort kept the call back.
            max_pending: requests on their way at one time.
            is_aborted: asked again and again; from when it says so on, `abort_calls` are sent until every
                request is answered.
        """
        if calls:
            asyncio.run(self._call_all(calls, on_answer, max_pending, is_aborted, abort_calls))

    def is_answering(self, path: str) -> bool:
        """Say whether GET `path` answers 200 within two seconds."""
        try:
            return self._client.get(path, timeout=2.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    async def _call_all(self, calls, on_answer, max_pending, is_aborted, abort_calls) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_pending)
        slots = asyncio.Semaphore(max_pending)
        last_answer = time.monotonic()

        async def send(client: httpx.AsyncClient, number: int, path: str, body: Any) -> None:
            nonlocal last_answer
            async with slots:
                if is_aborted():
                    return on_answer(number, None)
                try:
                    response = await client.post(path, json=body)
                except httpx.HTTPError as error:
                    await asyncio.sleep(_SETTLE_SECONDS)
                    raise self._unreachable(path, error) from None
            last_answer = time.monotonic()
            if response.status_code >= _SERVER_ERROR:
                await asyncio.sleep(_SETTLE_SECONDS)
            on_answer(number, self._read(path, response))

        async def watch(client: httpx.AsyncClient) -> None:
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                if end := self._describe_end():
                    raise EngineUnreachable(end)
                if is_aborted():
                    await asyncio.gather(*(client.post(path, json=body) for path, body in abort_calls))
                if time.monotonic() - last_answer > self._timeout_seconds:
                    raise EngineUnreachable(self._silence("no request"))

        async with httpx.AsyncClient(
            base_url=self.address, timeout=None, limits=limits, trust_env=False
        ) as client:
            pending = asyncio.gather(*(send(client, number, *call) for number, call in enumerate(calls)))
            watcher = asyncio.ensure_future(watch(client))
            try:
                await asyncio.wait([pending, watcher], return_when=asyncio.FIRST_COMPLETED)
                # raises what went wrong; the watcher does nothing else
                (pending if pending.done() else watcher).result()
            finally:
                watcher.cancel()
                pending.cancel()
                await asyncio.gather(pending, watcher, return_exceptions=True)

    def _read(self, path: str, response: httpx.Response) -> Any:
        if response.status_code >= _SERVER_ERROR and (end := self._describe_end()):
            raise EngineUnreachable(end)
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"{self.address}{path} answered {response.status_code}: "
                f"{' '.join(response.text.split())[:1000]}"
            )
        return response.json() if response.content else None

    def _unreachable(self, path: str, error: httpx.HTTPError) -> EngineUnreachable:
        if end := self._describe_end():
            return EngineUnreachable(end)
        if isinstance(error, httpx.TimeoutException):
            return EngineUnreachable(self._silence(path))
        return EngineUnreachable(f"{self.address}{path}: {type(error).__name__} {error}".rstrip())

    def _silence(self, what: str) -> str:
        return (
            f"{self.address}: {what} was answered within engine.server.request_timeout_seconds = "
            f"{self._timeout_seconds:g}"
        )
