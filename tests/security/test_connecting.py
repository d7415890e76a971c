"""Which connections come about, over each way and with both clients, and what those that do not say."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor

import gradserve
from gradserve.calls.exchange import TimeLimits
from gradserve.transport.driving import completed
from gradserve.transport.settings import ConnectionSettings, SocketSettings, Transport, Way
from gradserve.transport.sockets.aio import AsyncConnection, SecureAsyncConnection
from gradserve.transport.sockets.blocking import BlockingConnection, SecureBlockingConnection
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import Connect, Connection, TimeLimit
from gradserve.transport.sockets.payloads import Payloads
from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.tls import client_certificates
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_server.rpc.sockets.service import Grant
from gradserve_server.security.identity import PeerCertificate
from gradserve_testing import LocalServer
from tests.servers.announcing import announce, bulk_address
from tests.servers.certificates import Certificates
from tests.servers.connecting import NO_RETRIES, connect_with, connect_with_aio
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

LARGE = np.arange(2_000_000, dtype=np.float32)


class Case(NamedTuple):
    """A server, a client, and what the error has to say; nothing if they get on."""

    server: str
    client: str
    error: str = ""


CASES = {
    "no client certificate asked for": Case("server", "ca"),
    "one that is not asked for": Case("server", "worker-1"),
    "right client certificate": Case("mutual", "worker-1"),
    "expired": Case("expired", "ca", "is not accepted: .*expired"),
    "wrong authority": Case("server", "strange ca", "is not accepted: .*(issuer|self.signed)"),
    "wrong name": Case("elsewhere", "ca", "(not valid for 127.0.0.1|is not accepted: .*mismatch)"),
    "no client certificate": Case("mutual", "ca", "asks for the certificate of a client"),
    "client certificate of a wrong authority": Case("mutual", "stranger", "gets none that it accepts"),
    "expired client certificate": Case("mutual", "late", "gets none that it accepts"),
    "client without TLS": Case("server", "none", "uses TLS: connect with tls=gradserve.TLS"),
    "client without TLS or certificate": Case("mutual", "none", "uses TLS: connect with tls=gradserve.TLS"),
    "server without TLS": Case("none", "ca", "does not use TLS"),
}
"""Over gRPC."""


class Servers:
    """Servers of each kind, started when they are needed."""

    def __init__(self, certificates: Certificates, running: ExitStack) -> None:
        self._certificates = certificates
        self._running = running
        self._started: dict[str, LocalServer] = {}

    def __getitem__(self, kind: str) -> LocalServer:
        if kind not in self._started:
            self._started[kind] = self._running.enter_context(LocalServer(self._config(kind)))
        return self._started[kind]

    def _config(self, kind: str) -> ServerConfig:
        if kind == "none":
            return ServerConfig(runtime=NOT_WARMED_UP)
        if kind == "mutual":
            return self._certificates.config(asks_clients=True)
        return self._certificates.config(kind)


@pytest.fixture(scope="module")
def servers(certificates: Certificates) -> Iterator[Servers]:
    with ExitStack() as running:
        yield Servers(certificates, running)


def tls_of(certificates: Certificates, client: str) -> gradserve.TLS | None:
    if client == "none":
        return None
    if client in ("ca", "strange ca"):
        return certificates.client(strange_ca=client != "ca")
    return certificates.client(client)


def settings_of(tls: gradserve.TLS | None, transport: Transport, **sockets: Any) -> ConnectionSettings:
    return ConnectionSettings(
        TimeLimits(PATIENCE_SECONDS),
        NO_RETRIES,
        transport=transport,
        sockets=SocketSettings(**sockets),
        certificates=client_certificates(tls),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("client", ["blocking", "aio"])
def test_a_connection(servers: Servers, certificates: Certificates, case: Case, client: str) -> None:
    server = servers[case.server]
    settings = settings_of(tls_of(certificates, case.client), Transport.GRPC)
    assert_gets_on(client, server.address, settings, case.error)


BULK_CASES = {
    "right": Case("server", "ca"),
    "right client certificate": Case("mutual", "worker-1"),
    "wrong authority": Case("server", "strange ca", "is not accepted: .*(issuer|self.signed)"),
    "wrong name": Case("elsewhere", "ca", "is not accepted: .*mismatch"),
    "expired": Case("expired", "ca", "is not accepted: .*expired"),
    "no client certificate": Case("mutual", "ca", "certificate required"),
    "client certificate of a wrong authority": Case("mutual", "stranger", "unknown ca"),
    "expired client certificate": Case("mutual", "late", "certificate expired"),
    "the ticket of another client": Case("mutual", "worker-2", "no such ticket"),
    "client without TLS": Case("server", "none", r"this socket uses TLS: connect with tls=gradserve\.TLS"),
    "server without TLS": Case("none", "ca", "the server does not use TLS there"),
}
"""On a bulk socket, with a ticket of worker-1 if the server asks for certificates."""


@pytest.mark.parametrize("case", BULK_CASES.values(), ids=BULK_CASES)
@pytest.mark.parametrize("client", ["blocking", "aio"])
def test_a_bulk_connection(servers: Servers, certificates: Certificates, case: Case, client: str) -> None:
    server = servers[case.server]
    peer = PeerCertificate("worker-1", ("worker-1",)) if case.server == "mutual" else None
    grant = Grant("me", to_server=True, to_client=True, max_payload_bytes=1 << 20, peer=peer)
    ticket = server.inspect(lambda running: running.sockets.context.tickets.issue(grant))
    host, _, port = bulk_address(server).partition(":")
    tls = tls_of(certificates, case.client)
    settings = settings_of(tls, Transport.BULK)
    limit = TimeLimit(None, settings)
    step = Connect(Place(Way.BULK, host, int(port)), ticket, "me", Payloads(BufferPool(0)), host, limit)

    async def open_and_close(kind: type[Connection]) -> None:
        connection = await kind.open(step, settings)
        assert connection.is_usable()
        connection.close()

    def run() -> None:
        if client == "aio":
            return asyncio.run(open_and_close(AsyncConnection if tls is None else SecureAsyncConnection))
        return completed(open_and_close(BlockingConnection if tls is None else SecureBlockingConnection))

    if not case.error:
        return run()
    with pytest.raises(gradserve.GradserveError, match=case.error):
        run()
    return None


@pytest.mark.parametrize("kind", ["server", "mutual"])
@pytest.mark.parametrize("client", ["blocking", "aio"])
def test_calls_over_the_bulk_socket(servers: Servers, certificates: Certificates, kind: str, client: str) -> None:
    tls = certificates.client("worker-1" if kind == "mutual" else "")
    assert_gets_on(client, servers[kind].address, settings_of(tls, Transport.BULK), "")


@pytest.mark.parametrize("client", ["blocking", "aio"])
def test_large_payloads_over_several_sockets(servers: Servers, certificates: Certificates, client: str) -> None:
    settings = settings_of(certificates.client("worker-1"), Transport.BULK, long_round_trip=0.0)
    info = assert_gets_on(client, servers["mutual"].address, settings, "")
    assert info is not None
    assert info.num_sockets == 4


def test_a_bulk_socket_that_cannot_be_secured_is_not_used(servers: Servers, certificates: Certificates) -> None:
    with LocalServer(certificates.config()) as server:
        announce(server, tcp=[bulk_address(servers["none"])])
        with (
            gradserve.connect(
                server.address, timeout=PATIENCE_SECONDS, tls=certificates.client(), transport="bulk"
            ) as client,
            pytest.raises(gradserve.UnavailableError, match="the server does not use TLS there"),
        ):
            client.server_info()


def test_with_tls_calls_take_grpc_by_themselves(certificates: Certificates) -> None:
    config = certificates.config()
    listen = config.listen.model_copy(update={"shared_memory_socket": "off"})
    with (
        LocalServer(config.model_copy(update={"listen": listen})) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS, tls=certificates.client()) as client,
    ):
        assert client.server_info().transport.way == "grpc"


@pytest.mark.parametrize("way", ["grpc", "bulk"])
def test_the_certificate_of_a_client_is_known_to_its_calls(certificates: Certificates, way: Any) -> None:
    seen = Seen()
    with (
        LocalServer(certificates.config(asks_clients=True), Parts(interceptors=(seen,))) as server,
        gradserve.connect(
            server.address, timeout=PATIENCE_SECONDS, transport=way, tls=certificates.client("worker-1")
        ) as client,
    ):
        client.put(LARGE)
        assert client.server_info().transport.way == way
    assert seen.peers == {PeerCertificate("worker-1", ("worker-1",))}


class Seen:
    """Notes whose calls come."""

    def __init__(self) -> None:
        self.peers: set[PeerCertificate | None] = set()

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        async def noting(request: Any, call: Call) -> Any:
            self.peers.add(call.peer)
            return await handle(request, call)

        return noting


def assert_gets_on(
    client: str, address: str, settings: ConnectionSettings, error: str
) -> gradserve.TransportInfo | None:
    """Checks that calls with a large tensor succeed, or fail with an error; returns the way they took."""

    def blocking() -> gradserve.TransportInfo:
        with connect_with(address, settings) as connected:
            handle = connected.put(LARGE)
            np.testing.assert_array_equal(connected.get(handle, release=True), LARGE)
            info = connected.server_info().transport
            assert info.way == settings.transport
            return info

    async def aio() -> gradserve.TransportInfo:
        async with connect_with_aio(address, settings) as connected:
            handle = await connected.put(LARGE)
            np.testing.assert_array_equal(await connected.get(handle, release=True), LARGE)
            info = (await connected.server_info()).transport
            assert info.way == settings.transport
            return info

    def run() -> gradserve.TransportInfo:
        return blocking() if client == "blocking" else asyncio.run(aio())

    if not error:
        return run()
    with pytest.raises(gradserve.UnavailableError, match=error):
        run()
    return None
