"""Starts a server, on another port where the free one has been taken meanwhile, and starts it anew when it
has died.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megagrpo.config.engine import ServerEngineConfig
from megagrpo.engines.base import EngineError
from megagrpo.engines.server.http_client import EngineClient
from megagrpo.engines.server.process import ServerProcess
from megagrpo.engines.server.python_environment import EnginePackage, find_python
from megagrpo.errors import UserError

_PORT_TRIES = 3


class ServerKind(Protocol):
    """How the server of an engine is started."""

    package: EnginePackage
    config: ServerEngineConfig
    health_path: str

    def server_command(self, python: str, port: int) -> list[str]:
        """Return the command that starts the server, which listens on 127.0.0.1 alone."""

    def server_environment(self) -> Mapping[str, str]:
        """Return what the server's environment has beside this process's."""


class OwnedServer:
    """A server that this process started, through its restarts."""

    def __init__(self, kind: ServerKind, log_file: str | Path | None):
        """Start it and wait until it serves. Raises UserError: the engine is not installed, or its server
        does not start.
        """
        self._kind = kind
        self._log_file = Path(
            log_file or tempfile.mkstemp(prefix=f"megagrpo_{kind.package.name}_", suffix=".log")[1]
        )
        self._python = find_python(kind.config.server.python, kind.package)
        self._restarts_left = kind.config.server.max_restarts
        self._process = self._start(None)

    @property
    def address(self) -> str:
        """Its HTTP address, which restarts keep unless another process has taken the port."""
        return self._process.address

    @property
    def pid(self) -> int:
        """Process id of the server, which leads a process group of its own."""
        return self._process.pid

    def describe_end(self) -> str | None:
        """Return how the process ended; None while it runs."""
        return None if self._process.is_alive() else self._process.describe_end()

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    def restart(self) -> None:
        """Start it anew. EngineError once `engine.server.max_restarts` are used up, UserError if it does
        not start.
        """
        self._process.stop()
        if not self._restarts_left:
            raise EngineError(
                f"engine.server.max_restarts = {self._kind.config.server.max_restarts} are used up"
            )
        self._restarts_left -= 1
        self._process = self._start(self._process.port)

    def _start(self, port: int | None) -> ServerProcess:
        config = self._kind.config
        for tries_left in reversed(range(_PORT_TRIES)):
            environment = self._kind.server_environment()
            process = ServerProcess(
                lambda port: self._kind.server_command(self._python, port), environment, self._log_file, port
            )
            probe = EngineClient(process.address, config.server.request_timeout_seconds, process.describe_end)
            try:
                process.wait_ready(
                    lambda probe=probe: probe.is_answering(self._kind.health_path),
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
