"""The log and the status of a server while clients create parameters."""

import logging

import pytest

import gradserve
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP


def test_who_creates_them_makes_no_error(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The one that creates parameters asks for them before it sends values; who only looks for them is told."""
    caplog.set_level(logging.INFO, "gradserve_server.calls")
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server, gradserve.connect(server.address) as client:
        client.parameters({"w": [0.0]}, shared_name=name)
        assert client.server_status().errors == ()
        assert "NOT_FOUND" not in caplog.text
        with pytest.raises(gradserve.NotFoundError):
            client.parameters(shared_name="another")
        assert [each.code for each in client.server_status().errors] == ["NOT_FOUND"]
        assert "NOT_FOUND" in caplog.text
