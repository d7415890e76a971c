"""The fixtures, where their code is measured; docs/testing.md shows how users get them."""

import gradserve
from gradserve.testing import Faults, FaultyProxy, ServerThread
from gradserve.testing.fixtures import (
    gradserve_client,
    gradserve_faults,
    gradserve_network,
    gradserve_server,
)

__all__ = ["gradserve_client", "gradserve_faults", "gradserve_network", "gradserve_server"]


def test_they_belong_together(
    gradserve_server: ServerThread,
    gradserve_client: gradserve.Client,
    gradserve_faults: Faults,
    gradserve_network: FaultyProxy,
) -> None:
    fault = gradserve_faults.delay(0.0, "GetServerInfo")
    with gradserve.connect(gradserve_network.address, transport="grpc") as client:
        assert client.server_info().version == gradserve_client.server_info().version
    assert fault.happened == ["GetServerInfo"]
    assert gradserve_faults is gradserve_server.faults
