"""The way to one server: how it is reached, whether it is still there, and how it is started anew."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megagrpo.engines.base import EngineError
from megagrpo.engines.server.http_client import EngineClient, EngineUnreachable
from megagrpo.engines.server.owned_server import OwnedServer, ServerKind
from megagrpo.errors import UserError


class ServerConnection:
    """A server that was started here, or one at an address.

    Attributes:
        client: calls it.
    """

    def __init__(self, kind: ServerKind, address: str | None, log_file: str | Path | None):
        """Start a server and wait for it, or turn to the one at `address`.

        Raises:
            UserError: the engine is not installed, or its server does not start or is not there.
        """
        self._kind = kind
        self._server = None if address else OwnedServer(kind, log_file)
        self._loss: str | None = None
        self.client = self._connect(address or self._server.address)
        if address and not self.client.is_answering(kind.health_path):
            raise UserError(
                f"engine.server.addresses: {address}: no {kind.package.name} server answers there"
            )

    @property
    def pid(self) -> int | None:
        """Process id of the server, if it was started here."""
        return self._server.pid if self._server else None

    @property
    def loss(self) -> str | None:
        """Why the server can't be reached any more; None: it can, as far as is known."""
        return self._loss or self._describe_end()

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Take a server that can't be reached for lost, whether or not its process runs."""
        try:
            yield
        except EngineUnreachable as error:
            self._loss = str(error)
            raise

    def restart(self) -> None:
        """Start a server that was started here anew. Raises EngineError if it was not, or died too often;
        UserError: it does not start.
        """
        if self._server is None:
            raise EngineError(f"{self.client.address} was not started here, so it can't be started anew")
        self._loss = self.loss or "it is started anew"  # until that is done
        self._server.restart()
        self.find(self._server.address)

    def find(self, address: str | None = None) -> None:
        """Take note that the server is there again, at `address`; None: where it was."""
        if address not in (None, self.client.address):
            self.client.close()
            self.client = self._connect(address)
        self._loss = None

    def close(self) -> None:
        """End the calls that are on their way, and the server if it was started here."""
        self.client.close()
        if self._server is not None:
            self._server.stop()

    def _connect(self, address: str) -> EngineClient:
        return EngineClient(address, self._kind.config.server.request_timeout_seconds, self._describe_end)

    def _describe_end(self) -> str | None:
        return self._server.describe_end() if self._server else None
