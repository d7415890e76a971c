"""The interface of listeners, the part of a server that another transport can replace."""

from collections.abc import Sequence
from typing import Protocol

from gradserve_protocol.address import Address
from gradserve_protocol.tls import CertificateFiles
from gradserve_server.config import LimitsConfig
from gradserve_server.observe.calls import Way
from gradserve_server.rpc.boundary.chain import Service
from gradserve_server.rpc.boundary.interceptors import Admission


class Listener(Protocol):
    """Listens for calls to services. Made and used on one event loop; serves once."""

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports picked for port 0, and with absolute paths.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        ...

    async def serve(self) -> None:
        """Starts taking calls, and returns."""
        ...

    async def drain(self, grace: float) -> None:
        """Stops: closes the ports, lets calls in flight go on for `grace` seconds, then ends them with UNAVAILABLE.

        By then, no more calls are admitted. Also releases addresses that were bound but never served.
        """
        ...


class MakeListener(Protocol):
    """Makes a listener."""

    def __call__(
        self,
        services: Sequence[Service],
        admission: Admission,
        limits: LimitsConfig,
        certificates: CertificateFiles | None,
        way: Way,
        /,
    ) -> Listener:
        """Returns an unbound listener for services.

        `admission` admits calls until the server drains. With certificates, connections over TCP are encrypted. The
        listener counts its bytes and calls in `way`.
        """
        ...
