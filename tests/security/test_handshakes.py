"""Clients that do not shake hands as they should, on the ports of a server with TLS."""

import socket
from collections.abc import Iterator

import pytest

from gradserve_server.rpc.listeners.sockets import connection as connections
from gradserve_testing import LocalServer
from tests.servers.announcing import bulk_address
from tests.servers.certificates import Certificates
from tests.servers.polling import PATIENCE_SECONDS, eventually

HALF_A_HELLO = bytes.fromhex("160301020001000001fc0303") + bytes(60)
NO_HELLO = b"\x16" + b"garbage" * 40


@pytest.fixture
def server(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setattr(connections, "_HELLO_SECONDS", 0.3)
    with LocalServer(certificates.config(asks_clients=True)) as local:
        yield local


def num_connections(server: LocalServer) -> int:
    return server.inspect(lambda running: len(running.sockets.connections))


@pytest.mark.parametrize("data", [b"", HALF_A_HELLO, NO_HELLO], ids=["silence", "half a hello", "garbage"])
def test_who_does_not_shake_hands_is_left(server: LocalServer, data: bytes) -> None:
    host, _, port = bulk_address(server).partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as client:
        client.sendall(data)
        answer = b""
        while part := client.recv(4096):
            answer += part
    # After silence, the reason comes unencrypted; in the middle of a handshake, nothing that is not TLS does.
    assert not data or answer == b"" or answer[0] == 21
    eventually(lambda: num_connections(server), (0).__eq__)


def test_who_vanishes_in_a_handshake_is_forgotten(server: LocalServer) -> None:
    host, _, port = bulk_address(server).partition(":")
    for data in (b"", HALF_A_HELLO, NO_HELLO):
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as client:
            client.sendall(data)
    eventually(lambda: num_connections(server), (0).__eq__)
