"""What a client of a layer has sent to the server."""

from tests.layers.client.fake_server import FakeLayerServer


def forward_ids(server: FakeLayerServer) -> list[str]:
    return [request.forward_id for request in server.of("BatchNormForward")]


def released(server: FakeLayerServer) -> list[list[str]]:
    return [list(request.released_forward_ids) for request in server.of("BatchNormForward")]


def went_back(server: FakeLayerServer) -> list[str]:
    return [request.forward_id for request in server.of("BatchNormBackward")]
