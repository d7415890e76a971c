"""A layer of either face of the client, in front of a server that computes nothing."""

from typing import Any

import pytest

from tests.layers.client.fake_server import FACES, FakeLayerServer, result_of


@pytest.fixture
def server() -> FakeLayerServer:
    return FakeLayerServer()


@pytest.fixture(params=FACES, ids=lambda face: face.__name__)
def client(request: pytest.FixtureRequest, server: FakeLayerServer) -> Any:
    return request.param(server)


@pytest.fixture
def bn(client: Any) -> Any:
    return result_of(client.batch_norm(scope="bn"))
