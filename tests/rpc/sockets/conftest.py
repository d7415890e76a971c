"""A server with little room, and connections to its sockets."""

import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Self, TypeAlias

import pytest
from pydantic import ByteSize

from gradserve_protocol.tls import CertificateFiles, client_certificates
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.security.tls import server_certificates
from gradserve_testing import LocalServer
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import RawCalls

MIB = 1 << 20
LIMITS = LimitsConfig(
    max_message_bytes=ByteSize(4 * MIB),
    max_bytes=ByteSize(32 * MIB),
    max_inflight_bytes=ByteSize(8 * MIB),
    max_region_bytes=ByteSize(16 * MIB),
)
Connect: TypeAlias = Callable[..., FrameClient]


_OF_GRPC = 40
"""Descriptors that gRPC may open meanwhile."""


@dataclass(frozen=True)
class Use:
    """What connections may use, and must give back."""

    memory: int
    in_flight: int
    region_bytes: int
    regions: int
    shared_bytes: int
    readers: int
    connections: int
    descriptors: int
    threads: int

    def is_back_at(self, before: Self) -> bool:
        """True if nothing more is used than before, when connections of the test before may still have been closing."""
        allowed = replace(before, descriptors=before.descriptors + _OF_GRPC)
        return all(now <= then for now, then in zip(astuple(self), astuple(allowed), strict=True))


def use_of(local: LocalServer) -> Use:
    def look(server: Server) -> Use:
        context = server.sockets.context
        return Use(
            context.memory.used,
            context.in_flight.used,
            context.fair.region_bytes.used,
            context.fair.regions.used,
            context.shared_memory.used,
            context.readers.count,
            len(server.sockets.connections),
            len(os.listdir("/proc/self/fd")),
            sum(each.name.startswith("gradserve-transfer") for each in threading.enumerate()),
        )

    return local.inspect(look)


@pytest.fixture(scope="module")
def idle_seconds() -> float:
    """The silence in the middle of a frame after which the server ends a connection."""
    return 5 * PATIENCE_SECONDS


@pytest.fixture(scope="module")
def server(idle_seconds: float) -> Iterator[LocalServer]:
    runtime = RuntimeConfig(warm_up=False, stream_idle_seconds=idle_seconds)
    with LocalServer(ServerConfig(runtime=runtime, limits=LIMITS)) as local:
        yield local


@pytest.fixture(scope="module")
def raw(server: LocalServer) -> Iterator[RawCalls]:
    with RawCalls(server.address) as calls:
        component = accumulator_pb2.ComponentSpec(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=accumulator_pb2.PartialShape(unknown_rank=True)
        )
        calls.call(
            "CreateAccumulator",
            messages_pb2.CreateAccumulatorRequest(
                accumulator=accumulator_pb2.AccumulatorRef(name="a"),
                spec=accumulator_pb2.AccumulatorSpec(components=[component]),
            ),
        )
        issue_ticket(server.address)  # whatever gRPC opens once is open
        yield calls


@pytest.fixture
def unused(server: LocalServer, raw: RawCalls) -> Iterator[None]:
    """Checks that a test gives back all that it used."""
    before = use_of(server)
    yield
    eventually(lambda: use_of(server), lambda use: use.is_back_at(before))


def connector(local: LocalServer, way: str, context: ssl.SSLContext | None = None) -> Callable[..., FrameClient]:
    def connect(*, hello: bool = True, direction: int = 0, num_bytes: int = 0) -> FrameClient:
        ticket = issue_ticket(local.address, direction=direction, num_bytes=num_bytes)
        if way == "shared_memory":
            client = FrameClient.over_unix(ticket)
        else:
            client = FrameClient.over_tcp(ticket) if context is None else FrameClient.over_tls(ticket, context)
        if hello:
            assert client.hello(ticket.ticket).header.code == 0
        return client

    return connect


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def bulk_over_tls(local: LocalServer, certificates: Certificates) -> Iterator[Callable[..., FrameClient]]:
    """Makes the bulk socket of a server use TLS; gives what opens connections to it."""
    files = server_certificates(certificates.config().tls)

    def use(wanted: CertificateFiles | None) -> None:
        local.server.sockets._certificates = wanted

    client = client_certificates(certificates.client())
    assert client is not None
    local.inspect(lambda _: use(files))
    try:
        yield connector(local, "tls", client.current().context)
    finally:
        local.inspect(lambda _: use(None))


@pytest.fixture(params=["bulk", "bulk over TLS", "shared_memory"])
def connect(
    request: pytest.FixtureRequest, server: LocalServer, unused: None, certificates: Certificates
) -> Iterator[Connect]:
    """Opens connections of every kind."""
    if request.param == "bulk over TLS":
        with bulk_over_tls(server, certificates) as opens:
            yield opens
    else:
        yield connector(server, request.param)


@pytest.fixture
def connect_unix(server: LocalServer, unused: None) -> Connect:
    """Opens connections to the Unix socket."""
    return connector(server, "shared_memory")
