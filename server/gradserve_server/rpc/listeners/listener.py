"""What listens for calls, whatever they come by."""

from collections.abc import Sequence
from typing import Protocol

from gradserve.address import Address
from gradserve_server.config import LimitsConfig
from gradserve_server.rpc.boundary.admission import Admission
from gradserve_server.rpc.boundary.service import Service


class Listener(Protocol):
    """Listens for calls of services, and hands them over. Made and used on one event loop; serves once."""

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports that were picked for port 0, and whole paths.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        ...

    async def serve(self) -> None:
        """Begins to take calls, and returns."""
        ...

    async def drain(self, grace: float) -> None:
        """Ends: closes the ports, lets calls under way go on for `grace` seconds, then ends them with UNAVAILABLE.

        Nothing is admitted any more by then. Also lets go of what is bound where nothing was served.
        """
        ...


class MakeListener(Protocol):
    """Makes a listener."""

    def __call__(self, services: Sequence[Service], admission: Admission, limits: LimitsConfig, /) -> Listener:
        """Returns a listener that is not bound yet, for services whose calls an admission lets in."""
        ...
