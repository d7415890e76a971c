"""The HTTP port, which is bound when the server starts, and served once what serves it has been imported."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradserve.address import Address
from gradserve_server.observe.shown import Shown
from gradserve_server.system_errors import reason_of

if TYPE_CHECKING:
    from gradserve_server.observe.http.port import HttpPort

_log = logging.getLogger(__name__)

DEFAULT_PORT = 50080
_BACKLOG = 64


class ObservationPort:
    """The HTTP port of a server, or none. Used on one event loop."""

    def __init__(self, wanted: str, shown: Shown) -> None:
        """Takes HOST:PORT, "auto" or "off", and what the port shows."""
        self._wanted = wanted
        self._shown = shown
        self._bound: socket.socket | None = None
        self._port: HttpPort | None = None
        self._starting: asyncio.Task[None] | None = None
        self.address: Address | None = None
        """Where it listens, once it is bound; None if it does not."""

    @property
    def url(self) -> str:
        """The address as a URL; empty if there is no port."""
        return "" if self.address is None else f"http{'s' if self._shown.tls else ''}://{self.address}/"

    def bind(self) -> None:
        """Binds the address. If there is no free port on the loopback interface for "auto", there is no HTTP port.

        Raises:
            OSError: The address that was asked for cannot be bound.
        """
        if self._wanted == "off":
            return
        if self._wanted != "auto":
            self._bind(Address.to_listen(self._wanted))
            return
        for port in (DEFAULT_PORT, 0):
            try:
                self._bind(Address("127.0.0.1", port))
            except OSError as error:
                if port == 0:
                    _log.warning("no HTTP port: %s", error)
            else:
                return

    def serve(self) -> None:
        """Begins to take requests; the first may wait a moment for what is still being imported."""
        if self._bound is not None:
            self._starting = asyncio.create_task(self._serve(self._bound))

    async def close(self) -> None:
        """Closes the port."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._port is not None:
            await self._port.close()
        if self._bound is not None:
            self._bound.close()

    def _bind(self, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((address.host, address.port))
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise OSError(f"cannot listen for HTTP on {address}: {reason_of(error)}") from None
        bound.setblocking(False)
        self._bound = bound
        self.address = Address(address.host, bound.getsockname()[1])

    async def _serve(self, bound: socket.socket) -> None:
        try:
            make = await asyncio.to_thread(_import)
            self._port = make(self._shown)
            await self._port.serve(bound)
        except Exception:
            # Nothing that trains depends on it.
            _log.exception("the HTTP port cannot be served")
            bound.close()


def _import() -> "Callable[[Shown], HttpPort]":
    from gradserve_server.observe.http.assembly import make_port

    return make_port
