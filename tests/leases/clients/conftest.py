"""A server of a test alone."""

from collections.abc import Iterator

import pytest

from gradserve_server.config import LeaseConfig, ServerConfig
from gradserve_server.rpc.listeners.grpc_listener import ClientKeepalive
from tests.leases.clients.aging_server import CLIENT_LEASE, AgingServer
from tests.servers.runtime import NOT_WARMED_UP


@pytest.fixture
def server() -> Iterator[AgingServer]:
    """A server of this test alone, that notices soon when a connection is dead."""
    config = ServerConfig(runtime=NOT_WARMED_UP, leases=LeaseConfig(client_lease_seconds=CLIENT_LEASE))
    with AgingServer(config, ClientKeepalive(interval=0.3, timeout=0.3)) as local:
        yield local
