"""Servers that say that their sockets are elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gradserve.testing import ConnectionFaults, FaultyProxy
from gradserve.transport.settings import Transport
from gradserve_protocol.address import Address
from gradserve_testing import LocalServer


def announce(server: LocalServer, *, tcp: Sequence[str] = (), unix_path: str = "") -> None:
    """Makes a server announce other bulk sockets, "HOST:PORT", and another Unix socket, or none."""
    addresses = server.server.socket_addresses
    addresses.tcp = [Address.to_connect(each) for each in tcp]
    addresses.unix_path = unix_path


def bulk_address(server: LocalServer) -> str:
    """Returns the address of a server's bulk socket."""
    (bulk,) = server.server.socket_addresses.tcp
    return f"127.0.0.1:{bulk.port}"


@contextmanager
def behind(
    server: LocalServer, way: Transport, faults: ConnectionFaults | None = None
) -> Iterator[tuple[FaultyProxy, str]]:
    """Puts a proxy on one way to a server; yields it, and the address for clients that call in this way."""
    places = server.server.socket_addresses
    tcp, unix_path = places.tcp, places.unix_path
    targets = {
        Transport.GRPC: server.address,
        Transport.BULK: bulk_address(server),
        Transport.SHARED_MEMORY: unix_path,
    }
    with FaultyProxy(targets[way], faults) as proxy:
        if way is Transport.BULK:
            announce(server, tcp=[proxy.address])
        elif way is Transport.SHARED_MEMORY:
            announce(server, unix_path=proxy.address)
        yield proxy, proxy.address if way is Transport.GRPC else server.address
    places.tcp, places.unix_path = tcp, unix_path
