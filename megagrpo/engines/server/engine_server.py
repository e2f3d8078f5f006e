"""One server: started here as a child, and restarted, or given by its address; called, watched, ended."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megagrpo.config.engine_sections import ServerEngineConfig
from megagrpo.engines.base import EngineError
from megagrpo.engines.server.command import ServerCommand, find_python
from megagrpo.engines.server.http_client import Call, EngineClient, EngineUnreachable
from megagrpo.engines.server.server_process import ServerProcess
from megagrpo.errors import UserError

_PORT_TRIES = 3
_RETURN_SECONDS = 10.0  # how long a lost server that was not started here has to answer again
_POLL_SECONDS = 0.25


class EngineServer:
    """The way to a server. A server that can't be reached counts as lost, whether or not its process runs."""

    def __init__(
        self,
        command: ServerCommand,
        config: ServerEngineConfig,
        address: str | None = None,
        log_file: str | Path | None = None,
    ):
        """Start a server and wait for it, or turn to the one at `address`.

        Args:
            config: the `engine:` section.
            address: None: a server is started.
            log_file: of a server that is started; None: a temporary file.

        Raises:
            UserError: the engine is not installed, or its server does not start or is not there.
        """
        self._command, self._config = command, config
        self._loss: str | None = None
        self._process: ServerProcess | None = None
        self._restarts_left = config.server.max_restarts
        if address is None:
            prefix = f"megagrpo_{command.package.name}_"
            self._log_file = Path(log_file or tempfile.mkstemp(prefix=prefix, suffix=".log")[1])
            self._python = find_python(config.server.python, command.package)
            self._process = self._start(None)
        self._client = self._connect(address or self._process.address)
        if address and not self._client.is_answering(command.health_path):
            self._client.close()
            where = f"engine.server.addresses: {self._client.address}"
            raise UserError(f"{where}: no {command.package.name} server answers there")

    @property
    def address(self) -> str:
        """Its HTTP address, which restarts keep unless another process has taken the port; without user and
        password, for messages.
        """
        return self._client.address

    @property
    def url(self) -> str:
        """Its HTTP address, with the user and the password that were given."""
        return self._client.url

    @property
    def pid(self) -> int | None:
        """Process id of the server, which leads a process group of its own; None: it was not started here."""
        return self._process.pid if self._process else None

    @property
    def loss(self) -> str | None:
        """Why the server can't be reached any more; None: it can, as far as is known."""
        return self._loss or self._describe_end()

    def call(self, path: str, body: Any = None, is_repeatable: bool = False) -> Any:
        """POST `body` and return the answer; see EngineClient.call."""
        with self._noting_loss():
            return self._client.call(path, body, is_repeatable)

    def call_all(
        self,
        calls: Sequence[Call],
        on_answer: Callable[[int, Any], None],
        max_pending: int,
        is_aborted: Callable[[], bool],
        abort_calls: Sequence[Call],
    ) -> None:
        """Send many requests at once; see EngineClient.call_all."""
        with self._noting_loss():
            self._client.call_all(
                calls, on_answer, max_pending, is_aborted, abort_calls, self._command.sign_of_life
            )

    def restart(self) -> None:
        """Restart a server that was started here; wait for one that was not until it answers again.

        Raises:
            EngineError: it does not answer, or was lost more than `engine.server.max_restarts` times.
            UserError: it does not start.
        """
        self._loss = self.loss or "it is restarted"  # until that is done
        if self._process is not None:
            self._process.stop()
        if not self._restarts_left:
            raise EngineError(f"engine.server.max_restarts = {self._config.server.max_restarts} are used up")
        self._restarts_left -= 1
        if self._process is None:
            self._wait_for_return()
            self.find()
            return
        self._process = self._start(self._process.port)
        self.find(self._process.address)

    def find(self, address: str | None = None) -> None:
        """Note that the server has recovered, at `address`; None: where it was."""
        if address not in (None, self.url):
            self._client.close()
            self._client = self._connect(address)
        self._loss = None

    def close(self) -> None:
        """Close the connections, and end the server if it was started here."""
        self._client.close()
        if self._process is not None:
            self._process.stop()

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except EngineUnreachable as error:
            self._loss = str(error)
            raise

    def _wait_for_return(self) -> None:
        deadline = time.monotonic() + _RETURN_SECONDS
        while not self._client.is_answering(self._command.health_path):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.address} was not started here, so it can't be restarted, and does not answer "
                    f"within {_RETURN_SECONDS:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def _connect(self, address: str) -> EngineClient:
        return EngineClient(address, self._config.server.request_timeout_seconds, self._describe_end)

    def _describe_end(self) -> str | None:
        if self._process is None or self._process.is_alive():
            return None
        return self._process.describe_end()

    def _start(self, port: int | None) -> ServerProcess:
        """Start it and wait until it serves; on another port where another process has taken the free one."""
        config = self._config
        for tries_left in reversed(range(_PORT_TRIES)):
            process = ServerProcess(
                lambda port: self._command.words(self._python, port),
                self._command.environment(),
                self._log_file,
                port,
            )
            probe = EngineClient(process.address, config.server.request_timeout_seconds, process.describe_end)
            try:
                process.wait_ready(
                    lambda probe=probe: probe.is_answering(self._command.health_path),
                    config.server.start_timeout_seconds,
                )
                return process
            except UserError as error:
                if not tries_left or not process.port_was_taken():
                    raise UserError(f"engine.name: {config.name}: {error}") from None
                port = None  # another one
            except BaseException:
                process.stop(0)
                raise
            finally:
                probe.close()
        raise AssertionError("unreachable: the last try returns or raises")
