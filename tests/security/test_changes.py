"""What a change of the access file does to clients that are connected."""

from pathlib import Path
from typing import Any

import grpc
import pytest

import gradserve
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS, entry, replace_file, serving
from tests.servers.polling import PATIENCE_SECONDS, eventually

AS_BEFORE = entry("worker", {"*": "worker"}, TOKENS["worker"])


def change(local: LocalServer, path: Path, text: str) -> None:
    replace_file(path, text)
    local.inspect(lambda server: server.access.look())  # type: ignore[union-attr]


@pytest.mark.parametrize("transport", ["grpc", "bulk", "shared_memory"])
def test_a_changed_policy_counts_for_the_next_call(tmp_path: Path, transport: Any) -> None:
    path = tmp_path / "access.toml"
    with (
        serving(path, AS_BEFORE) as local,
        gradserve.connect(
            local.address, token=TOKENS["worker"], transport=transport, timeout=PATIENCE_SECONDS
        ) as client,
    ):
        handle = client.put([1.0])
        assert client.server_info().transport.way == transport
        change(local, path, entry("worker", {}, TOKENS["worker"]))
        with pytest.raises(gradserve.PermissionDeniedError, match="'worker' has no role there"):
            client.get(handle)
        change(local, path, entry("worker", {"*": "worker"}, TOKENS["colleague"]))
        with pytest.raises(gradserve.UnauthenticatedError, match="does not know this token"):
            client.get(handle)
        change(local, path, "broken")
        with pytest.raises(gradserve.UnauthenticatedError, match="does not know this token"):
            client.get(handle)
        change(local, path, AS_BEFORE)
        assert client.get(handle) == [1.0]


def test_the_server_looks_at_the_file_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    with serving(path, AS_BEFORE) as local, gradserve.connect(local.address, token=TOKENS["colleague"]) as client:
        with pytest.raises(gradserve.UnauthenticatedError):
            client.server_info()
        replace_file(path, AS_BEFORE + entry("colleague", {"*": "worker"}, TOKENS["colleague"]))
        wait_until_known(client)


def wait_until_known(client: gradserve.Client) -> None:
    """Asks until the server knows the client."""

    def is_known() -> bool:
        try:
            client.server_info()
        except gradserve.UnauthenticatedError:
            return False
        return True

    eventually(is_known)


def test_without_an_access_file_credentials_do_not_matter(server_address: str) -> None:
    for token in (None, TOKENS["admin"]):
        with gradserve.connect(server_address, token=token) as client:
            assert client.server_info().version == gradserve.__version__
    with grpc.insecure_channel(server_address) as channel:
        call: Any = channel.unary_unary("/gradserve.v1.ServerService/GetServerInfo")
        assert call(b"", timeout=PATIENCE_SECONDS, metadata=(("authorization", "Basic nothing"),))
