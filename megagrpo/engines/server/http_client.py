"""JSON over HTTP to an engine server: every call has a time-out, none outlives the server, no answer is
larger than what was asked for can be, and a call whose connection breaks is made again.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx2 as httpx
from pydantic_core import from_json

from megagrpo.engines.base import EngineError

ANSWER_BYTES = 64 * 2**20
"""Largest answer to a call that says nothing else: descriptions of all parameters of a large model fit."""
NO_ANSWER = object()
"""Stands for the answer to a call that an abort kept back."""


class Call(NamedTuple):
    """One request."""

    path: str
    body: Any = None  # goes as JSON
    answer_bytes: int = ANSWER_BYTES  # a larger answer is an error
    about: str = ""  # what it asks for, for errors
    method: str = "POST"


_WATCH_SECONDS = 0.25
_SETTLE_SECONDS = 1.0  # a connection breaks a moment before the process can be seen to have ended
# vLLM answers 500 once a worker is lost, and was seen to end more than a second later on busy cores
_ENDING_SECONDS = 10.0
_SERVER_ERROR = 500
_SIGNS_IN_A_TIMEOUT = 8  # how many signs of life are asked for within one time-out
# time-outs without an answer that signs of life excuse: an hour at the default. A server that somebody else
# has paused, or that has lost a request, gives signs for ever
_EXCUSED_TIMEOUTS = 12
# how long an abort may take: a paused server may keep a request that has just come until it goes on
_ABORT_SECONDS = 10.0
_ATTEMPTS = 3  # for a call whose connection breaks while the server lives
_SHOWN_CHARACTERS = 1000  # how much of a refusal an error shows


class EngineUnreachable(EngineError):
    """The server does not answer: it has ended, it hangs, or it is not there."""


class EngineClient:
    """Calls one server."""

    def __init__(self, address: str, timeout_seconds: float, describe_end: Callable[[], str | None]):
        """`describe_end()` says how the server ended; None while it runs, or where that can't be known."""
        self.url, self._timeout_seconds, self._describe_end = address, timeout_seconds, describe_end
        self.address, self._credentials = split_credentials(address)
        self._client = httpx.Client(
            base_url=self.address, auth=self._credentials, timeout=timeout_seconds, trust_env=False
        )

    def call(self, path: str, body: Any = None, is_repeatable: bool = False) -> Any:
        """Send `body` as JSON and return the answer's JSON (None where it has none).

        Args:
            is_repeatable: the call may be made again after its connection broke, when the server may have
                followed it already.

        Raises:
            EngineUnreachable: no answer, for the reason that it gives.
            EngineError: the server refused, with what it said, or its answer is too large or not JSON.
        """
        call = Call(path, body)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                status, content = self._post(call)
                break
            except httpx.HTTPError as error:
                time.sleep(_SETTLE_SECONDS)
                if attempt == _ATTEMPTS or not is_repeatable or self._is_final(error):
                    raise self._unreachable(call, error) from None
        if status >= _SERVER_ERROR:
            deadline = time.monotonic() + _ENDING_SECONDS
            while not self._describe_end() and time.monotonic() < deadline:
                time.sleep(_WATCH_SECONDS)
        return self._read(call, status, content)

    def call_all(
        self,
        calls: Sequence[Call],
        on_answer: Callable[[int, Any], None],
        max_pending: int,
        is_aborted: Callable[[], bool],
        abort_calls: Sequence[Call],
        sign_of_life: Call | None = None,
    ) -> None:
        """Send many requests at once and wait for all answers.

        The time-out counts from the last answer to any of them, or the last sign of life, so neither a long
        queue nor a long completion is silence; twelve time-outs without any answer are, whatever the signs.
        The server's end is noticed at once.

        Args:
            on_answer: gets the number of a call and its answer, one at a time as they come; NO_ANSWER where
                an abort kept the call back, or it was not answered.
            max_pending: requests that are sent and not answered, at most.
            is_aborted: asked again and again; from when it says so on, `abort_calls` are sent until every
                request is answered, for ten seconds. What has no answer then counts as NO_ANSWER.
            sign_of_life: made again and again; an answer comes from where tokens are computed.
        """
        if calls:
            asyncio.run(self._call_all(calls, on_answer, max_pending, is_aborted, abort_calls, sign_of_life))

    def is_answering(self, path: str) -> bool:
        """Say whether GET `path` answers 200 within two seconds."""
        try:
            with self._client.stream("GET", path, timeout=2.0) as response:  # its body may be of any size
                return response.status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    async def _call_all(self, calls, on_answer, max_pending, is_aborted, abort_calls, sign_of_life) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_pending)
        slots = asyncio.Semaphore(max_pending)
        last_answer = last_sign = time.monotonic()
        sends: list[asyncio.Task[None]] = []
        is_given_up = False

        async def send_or_give_up(client: httpx.AsyncClient, number: int, call: Call) -> None:
            try:
                await send(client, number, call)
            except asyncio.CancelledError:
                if not is_given_up:
                    raise
                on_answer(number, NO_ANSWER)

        async def send(client: httpx.AsyncClient, number: int, call: Call) -> None:
            nonlocal last_answer, last_sign
            async with slots:
                for attempt in range(1, _ATTEMPTS + 1):
                    if is_aborted():
                        return on_answer(number, NO_ANSWER)
                    try:
                        status, content = await self._post_async(client, call)
                        break
                    except httpx.HTTPError as error:
                        await asyncio.sleep(_SETTLE_SECONDS)
                        if attempt == _ATTEMPTS or self._is_final(error):
                            raise self._unreachable(call, error) from None
            last_answer = last_sign = time.monotonic()
            if status >= _SERVER_ERROR:
                await asyncio.sleep(_SETTLE_SECONDS)
            on_answer(number, self._read(call, status, content))

        async def watch(client: httpx.AsyncClient) -> None:
            nonlocal is_given_up
            abort_ends: float | None = None
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                if end := self._describe_end():
                    raise EngineUnreachable(end)
                if is_aborted():
                    abort_ends = abort_ends or time.monotonic() + _ABORT_SECONDS
                    with suppress(httpx.HTTPError, TimeoutError):  # it is sent again
                        async with asyncio.timeout(_ABORT_SECONDS):
                            await asyncio.gather(*(self._post_async(client, call) for call in abort_calls))
                    if time.monotonic() > abort_ends:
                        is_given_up = True
                        for task in sends:
                            task.cancel()
                now, longest = time.monotonic(), self._timeout_seconds
                if now - last_sign > longest or now - last_answer > _EXCUSED_TIMEOUTS * longest:
                    raise EngineUnreachable(self._silence("no request"))

        async def listen(client: httpx.AsyncClient) -> None:
            nonlocal last_sign
            while sign_of_life is not None:
                await asyncio.sleep(self._timeout_seconds / _SIGNS_IN_A_TIMEOUT)
                with suppress(httpx.HTTPError, EngineError):  # no sign: `watch` counts the time
                    status, _ = await self._post_async(client, sign_of_life)
                    if status == httpx.codes.OK:
                        last_sign = time.monotonic()

        async with httpx.AsyncClient(
            base_url=self.address, auth=self._credentials, timeout=None, limits=limits, trust_env=False
        ) as client:
            sends += [
                asyncio.ensure_future(send_or_give_up(client, number, call))
                for number, call in enumerate(calls)
            ]
            pending = asyncio.gather(*sends)
            watcher = asyncio.ensure_future(watch(client))
            listener = asyncio.ensure_future(listen(client))
            try:
                await asyncio.wait([pending, watcher], return_when=asyncio.FIRST_COMPLETED)
                # raises what went wrong; the watcher does nothing else
                (pending if pending.done() else watcher).result()
            finally:
                for task in (pending, watcher, listener):
                    task.cancel()
                await asyncio.gather(pending, watcher, listener, return_exceptions=True)

    def _post(self, call: Call) -> tuple[int, bytes]:
        """Return status and content of an answer, of which no more than is allowed is read."""
        deadline = time.monotonic() + self._timeout_seconds
        content = bytearray()
        with self._client.stream(call.method, call.path, json=call.body) as response:
            for part in response.iter_bytes():
                content += part
                self._check_size(call, content)
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer goes on and on")
        return response.status_code, bytes(content)

    async def _post_async(self, client: httpx.AsyncClient, call: Call) -> tuple[int, bytes]:
        content = bytearray()
        async with client.stream(call.method, call.path, json=call.body) as response:
            async for part in response.aiter_bytes():
                content += part
                self._check_size(call, content)
        return response.status_code, bytes(content)

    def _check_size(self, call: Call, content: bytearray) -> None:
        if len(content) > call.answer_bytes:
            raise EngineError(
                f"{self._place(call)}: the answer is larger than {call.answer_bytes} bytes, which what was "
                "asked for can't fill"
            )

    def _read(self, call: Call, status: int, content: bytes) -> Any:
        if status >= _SERVER_ERROR and (end := self._describe_end()):
            raise EngineUnreachable(end)
        if status != httpx.codes.OK:
            text = " ".join(content[: 4 * _SHOWN_CHARACTERS].decode(errors="replace").split())
            raise EngineError(f"{self._place(call)} answered {status}: {text[:_SHOWN_CHARACTERS]}")
        if not content:
            return None
        try:
            return from_json(content)
        except ValueError as error:  # nested too deep, too
            raise EngineError(f"{self._place(call)}: the answer is not JSON: {error}") from None

    def _place(self, call: Call) -> str:
        return f"{self.address}{call.path}" + (f" ({call.about})" if call.about else "")

    def _is_final(self, error: httpx.HTTPError) -> bool:
        """Return whether a repeated call is pointless: the server has ended, or is silent."""
        return isinstance(error, httpx.TimeoutException) or self._describe_end() is not None

    def _unreachable(self, call: Call, error: httpx.HTTPError) -> EngineUnreachable:
        if end := self._describe_end():
            return EngineUnreachable(end)
        if isinstance(error, httpx.TimeoutException):
            return EngineUnreachable(self._silence(call.path))
        return EngineUnreachable(f"{self._place(call)}: {type(error).__name__} {error}".rstrip())

    def _silence(self, what: str) -> str:
        return (
            f"{self.address}: {what} was answered within engine.server.request_timeout_seconds = "
            f"{self._timeout_seconds:g}"
        )


def split_credentials(address: str) -> tuple[str, tuple[str, str] | None]:
    """Return an address without its user and password, and these: so that no message, log or library that is
    given the address can print them.
    """
    parts = urlsplit(address)
    user_info, separator, place = parts.netloc.rpartition("@")
    if not separator:
        return address, None
    user, _, password = user_info.partition(":")
    return urlunsplit(parts._replace(netloc=place)), (unquote(user), unquote(password))
