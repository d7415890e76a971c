from collections.abc import Iterator

import pytest

import gradserve
from tests.client.parameters.fake_server import FakeParameterServer, client_of


@pytest.fixture
def server() -> FakeParameterServer:
    return FakeParameterServer()


@pytest.fixture
def client(server: FakeParameterServer) -> Iterator[gradserve.Client]:
    with client_of(server) as connected:
        yield connected
