"""Metadata of megabytes, and names that look like paths."""

from pathlib import Path
from typing import Literal

import grpc
import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import server_messages_pb2, server_service_pb2_grpc
from gradserve_server.config import RuntimeConfig, ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Bearer " + "x" * (1 << 20)),),
        (("x" * (1 << 20), "y"),),
        tuple((f"key-{number}", "x" * 100) for number in range(10_000)),
    ],
    ids=["value", "key", "number"],
)
def test_metadata_of_megabytes_is_refused(server_address: str, metadata: tuple[tuple[str, str], ...]) -> None:
    request = server_messages_pb2.GetServerInfoRequest()
    with grpc.insecure_channel(server_address) as channel:
        stub = server_service_pb2_grpc.ServerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            stub.GetServerInfo(request, metadata=metadata, timeout=PATIENCE_SECONDS)
        assert error.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert stub.GetServerInfo(request, timeout=PATIENCE_SECONDS, wait_for_ready=True).version


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_no_name_is_a_path(tmp_path: Path, durability: Literal["round", "gradient"]) -> None:
    names = ["../../evil", "/etc/evil", "a/b", "..", "segments", "evil\nname", "~", "%2e%2e", "évil"]
    state = StateConfig(state_dir=str(tmp_path / "state"), durability=durability)
    config = ServerConfig(state=state, runtime=RuntimeConfig(warm_up=False))
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        for name in names:
            accumulator = client.conditional_accumulator("float32", (3,), shared_name=name, container=name)
            accumulator.apply_grad(np.ones(3, np.float32))
            assert accumulator.take_grad(1).tolist() == [1, 1, 1]
            client.batch_norm(scope=name, container=name).forward(np.ones((4, 3), np.float32))
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    own = {"gradserve-state", "lock", "metadata.sqlite", "segments/000001.segment", "segments/commits"}
    assert files == {f"state/{name}" for name in own}
