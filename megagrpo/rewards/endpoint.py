"""An HTTP endpoint that a reward asks: retried, cached, with a key that only the environment holds."""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2 as httpx

from megagrpo.errors import UserError

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0


class Endpoint:
    """Asks one address; may be called from several threads.

    Args:
        reward: whose options these are, for messages.
        address: `http://HOST:PORT`, or with a path before the calls'.
        key_variable: environment variable with a key, sent as a bearer token (`rewards.environment` lets it
            through); None: no key.
        retries: after a connection that fails, or an answer that says to come again.
        seconds: that one request may take.
        cache: SQLite file that keeps answers over runs and workers; None: each worker's memory does.
    """

    def __init__(
        self,
        reward: str,
        address: str,
        key_variable: str | None,
        retries: int,
        seconds: float,
        cache: str | None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        if not isinstance(address, str) or not address.startswith(("http://", "https://")):
            raise UserError(
                f"rewards.functions: {reward!r}: address is {address!r}; http://HOST:PORT is needed"
            )
        headers = {}
        if key_variable is not None:
            if not (key := os.environ.get(key_variable)):
                raise UserError(
                    f"rewards.functions: {reward!r}: key_variable: {key_variable} is not in the environment "
                    f"of reward workers; set it, and rewards.environment=[{key_variable}]"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._address, self._retries, self._sleep = address.rstrip("/"), retries, sleep
        self._client = httpx.Client(headers=headers, timeout=seconds)
        self._answers: dict[str, Any] = {}
        self._file = None if cache is None else cache
        if self._file is not None:
            with self._open() as database:
                database.execute("CREATE TABLE IF NOT EXISTS answers (asked TEXT PRIMARY KEY, answer TEXT)")

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request, from the cache where it was asked before.

        Raises:
            ConnectionError: the endpoint is away, or stays busy.
            ValueError: it refuses the request, or answers no JSON.
        """
        text = json.dumps([self._address, path, body], sort_keys=True)
        asked = hashlib.sha256(text.encode()).hexdigest()
        if asked not in self._answers:
            found = self._look_up(asked)
            self._answers[asked] = self._request(path, body) if found is None else found
            if found is None:
                self._keep(asked, self._answers[asked])
        return self._answers[asked]

    def _request(self, path: str, body: Mapping[str, Any]) -> Any:
        failure = ""
        for attempt in range(self._retries + 1):
            if attempt:
                self._sleep(min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS))
            try:
                answer = self._client.post(f"{self._address}{path}", json=body)
            except httpx.TransportError as error:  # refused, reset, timed out
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in RETRIED:
                failure = f"HTTP {answer.status_code}"
                continue
            if answer.status_code != 200:
                raise ValueError(f"{self._address}{path}: HTTP {answer.status_code}: {answer.text[:200]}")
            try:
                return answer.json()
            except ValueError as error:
                raise ValueError(f"{self._address}{path}: no JSON: {answer.text[:200]!r}") from error
        raise ConnectionError(f"{self._address}{path}: {failure}, {self._retries + 1} times")

    # ---- the file, which workers and runs may share

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(str(self._file), timeout=30.0, isolation_level=None)

    def _look_up(self, asked: str) -> Any:
        if self._file is None:
            return None
        with self._open() as database:
            row = database.execute("SELECT answer FROM answers WHERE asked = ?", (asked,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _keep(self, asked: str, answer: Any) -> None:
        if self._file is not None:
            with self._open() as database:
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (asked, json.dumps(answer)))
