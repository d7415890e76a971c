"""What the HTTP port shows."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass

from gradserve_server.observe.status.server import StatusSource
from gradserve_server.security.credentials import Credentials
from gradserve_server.security.identity import Identity


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the port shows, and to whom.

    Attributes:
        status: Takes snapshots of the server, on the server's event loop.
        identify: Returns the identity of credentials; raises UnauthenticatedError. Safe to call in any thread.
        asks_for_token: Whether requests have to show a token.
        hosts: The names of this server in Host headers, beside localhost.
        tls: The certificates; None if the port is not encrypted.
    """

    status: StatusSource
    identify: Callable[[Credentials], Identity]
    asks_for_token: bool
    hosts: tuple[str, ...]
    tls: ssl.SSLContext | None
