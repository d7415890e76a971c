"""Identities that clients prove with certificates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradserve
from gradserve_server.config import SecurityConfig
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS, entry
from tests.servers.certificates import Certificates
from tests.servers.polling import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def server(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path: Path = tmp_path_factory.mktemp("access") / "access.toml"
    path.write_text(
        entry("one", {"*": "worker"}).replace("users = []", 'certificates = ["worker-1"]')
        + entry("chief", {"*": "chief"}, TOKENS["chief"])
    )
    config = certificates.config(asks_clients=True)
    with LocalServer(config.model_copy(update={"security": SecurityConfig(access=str(path))})) as local:
        yield local


@pytest.mark.parametrize("transport", ["grpc", "bulk"])
def test_the_name_in_a_certificate_is_an_identity(
    server: LocalServer, certificates: Certificates, transport: Any
) -> None:
    def connect(name: str, token: str | None = None) -> gradserve.Client:
        tls = certificates.client(name)
        return gradserve.connect(server.address, tls=tls, token=token, transport=transport, timeout=PATIENCE_SECONDS)

    with connect("worker-1") as one, connect("worker-2") as two, connect("worker-2", TOKENS["chief"]) as chief:
        handle = one.put([1.0])
        assert one.get(handle) == [1.0]
        with pytest.raises(gradserve.PermissionDeniedError, match="'one' has the role worker"):
            one.delete_accumulator("x")
        with pytest.raises(gradserve.UnauthenticatedError, match="does not know this client certificate"):
            two.get(handle)
        with pytest.raises(gradserve.NotFoundError):
            chief.get(handle)
        chief.delete_accumulator("x")
