"""Servers that say that their sockets are elsewhere."""

from collections.abc import Sequence

from gradserve.address import Address
from gradserve_server.testing import LocalServer


def announce(server: LocalServer, *, tcp: Sequence[str] = (), unix_path: str = "") -> None:
    """Makes a server announce other bulk sockets, "HOST:PORT", and another Unix socket, or none."""
    addresses = server.server._socket_addresses
    addresses.tcp = [Address.to_connect(each) for each in tcp]
    addresses.unix_path = unix_path


def bulk_address(server: LocalServer) -> str:
    """Returns the address of a server's bulk socket."""
    (bulk,) = server.server._socket_addresses.tcp
    return f"127.0.0.1:{bulk.port}"
