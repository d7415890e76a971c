"""A server of a test alone."""

from collections.abc import Iterator

import pytest

from gradserve_server.config import LeaseConfig, ServerConfig
from gradserve_server.rpc.listeners.grpc.listener import ClientKeepalive
from tests.resources.clients.aging_server import CLIENT_LEASE, AgingServer
from tests.servers.runtime import NOT_WARMED_UP

CONFIG = ServerConfig(runtime=NOT_WARMED_UP, leases=LeaseConfig(client_lease_seconds=CLIENT_LEASE))


@pytest.fixture
def server() -> Iterator[AgingServer]:
    """A server of this test alone."""
    with AgingServer(CONFIG) as local:
        yield local


@pytest.fixture
def watchful_server() -> Iterator[AgingServer]:
    """A server of this test alone that notices soon when a connection is dead: after 1.3 s."""
    with AgingServer(CONFIG, ClientKeepalive(interval=0.3, timeout=1.0)) as local:
        yield local
