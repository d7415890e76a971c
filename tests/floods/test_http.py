"""The HTTP port under attack: nothing that its clients send reaches the server's event loop, or takes much."""

import asyncio
import errno
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from gradserve_server.config import ServerConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.observe.http import port as connections
from gradserve_server.observe.http import views
from gradserve_server.observe.http import views as latest
from gradserve_server.observe.http.exchange import MOST_HEAD_BYTES, Answer, Exchange, HeadError
from gradserve_server.observe.http.port import MOST_CONNECTIONS, HttpPort, UnsentBodies
from gradserve_server.observe.http.views import Latest, Pictures
from gradserve_server.observe.port import CpuBudget
from gradserve_server.observe.status.snapshot import StatusRequest
from gradserve_server.rpc.listeners.sockets import listener
from gradserve_server.security.tls import context_of, server_certificates
from gradserve_testing import LocalServer
from tests.floods.work import calls_of
from tests.observe.http_client import connect, get, url_of
from tests.servers.certificates import Certificates
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
BODIES = {
    "of a length": b"Content-Length: 100000000\r\n\r\n",
    "in chunks": b"Transfer-Encoding: chunked\r\n\r\n",
    "compressed": b"Content-Encoding: deflate\r\nContent-Length: 100000000\r\n\r\n",
    "expected": b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n",
}
MOST_CALLS_OF_A_HEAD = 3_000
"""A plain request takes some 400."""


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server


def opened(local: LocalServer) -> socket.socket:
    place = urlsplit(url_of(local))
    assert place.hostname is not None
    assert place.port is not None
    return socket.create_connection((place.hostname, place.port), PATIENCE_SECONDS)


def answer_to(local: LocalServer, data: bytes) -> bytes:
    with opened(local) as client:
        client.sendall(data)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    return answer


class Port:
    """An HTTP port on the event loop of a test.

    Attributes:
        port: The port.
        address: Where it listens.
    """

    def __init__(self, port: HttpPort, address: Any) -> None:
        self.port = port
        self.address = address

    async def num_connections(self) -> int:
        return self.port.num_connections


Respond = Callable[[Any], Any]


@asynccontextmanager
async def serving(respond: Respond, tls: ssl.SSLContext | None = None) -> AsyncIterator[Port]:
    async def close() -> None:
        pass

    answering: Any = SimpleNamespace(answer=respond, close=close)
    port, stop = HttpPort(answering, tls), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.setblocking(False)
        task = asyncio.create_task(port.serve(bound, stop))
        yield Port(port, bound.getsockname())
        stop.set()
        await task


async def said(request: Any) -> Answer:
    return Answer(200, request.path.encode())


def test_it_answers_while_the_servers_event_loop_is_busy(local: LocalServer) -> None:
    url = url_of(local)
    # On the event loop, which does nothing else before the answer has come.
    assert local.inspect(lambda _: get(url, "/healthz").text) == "ok\n"


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_no_body_is_read(local: LocalServer, body: bytes) -> None:
    assert answer_to(local, HEAD + body).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nA : b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\r\n\r\n",
        HEAD + b"A: b\r\n" * 100 + b"\r\n",
        HEAD + b"A: " + b"b" * MOST_HEAD_BYTES + b"\r\n\r\n",
    ],
)
def test_a_malformed_request_leaves_no_line_in_the_log(
    local: LocalServer, caplog: pytest.LogCaptureFixture, head: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        answer = answer_to(local, head)
    assert answer.startswith(b"HTTP/1.1 4")
    assert not [each for each in caplog.records if each.name.startswith("gradserve_server.observe")]


def test_a_hostile_accept_header_is_no_fault(local: LocalServer) -> None:
    for version in ("x", "9" * 5000, "1.0.0;escaping=x"):
        accept = f"application/openmetrics-text; version={version}"
        answer = get(url_of(local), "/metrics", Accept=accept)
        expected = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert (answer.status, answer.headers["content-type"].partition("; escaping")[0]) == (200, expected)


@pytest.mark.parametrize("path", ["/api/events", "/api/status", "/metrics"])
def test_the_head_of_an_answer_has_no_body_and_ends(local: LocalServer, path: str) -> None:
    with closing(connect(url_of(local))) as connection:
        for _ in range(100):  # more than there may be viewers
            connection.request("HEAD", path)
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"")


def test_a_viewer_that_leaves_makes_room_for_another(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "EVENT_SECONDS", 0.01)  # who has left is noticed at the next event

    def viewer() -> HTTPResponse:
        connection = viewers.enter_context(closing(connect(url_of(local))))
        connection.request("GET", "/api/events")
        return connection.getresponse()

    with ExitStack() as viewers:
        assert [viewer().status for _ in range(64)] == [200] * 64
        refused = viewer()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert refused.read() == b'{"error": "64 viewers are connected already"}'
    with ExitStack() as viewers:
        seen = eventually(viewer, lambda response: response.status == 200)
        assert json.loads(seen.readline().removeprefix(b"data: "))["version"]


WORST_HEADS = {
    "many lines": HEAD + b"A:b\r\n" * 61 + b"\r\n",
    "long lines": HEAD + b"".join(b"%d: %s\r\n" % (each, b"b" * 120) for each in range(60)) + b"\r\n",
    "a long line": HEAD + b"A:" + b" " * (MOST_HEAD_BYTES - 100) + b"b\r\n\r\n",
    "a long query": b"GET /?%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"&".join([b"a=%41"] * 16)),
    "a query of many fields": b"GET /?%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"&" * 8000),
    "lines that go on": HEAD + b"A:b\r\n" + b" c\r\n" * 60 + b"\r\n",
    "too many lines": HEAD + b"A:b\r\n" * 1500 + b"\r\n",
}


@pytest.mark.parametrize("head", WORST_HEADS.values(), ids=WORST_HEADS)
def test_reading_a_head_is_little_work(head: bytes) -> None:
    def read() -> None:
        with suppress(HeadError):
            Exchange().read(head)

    read()  # what is compiled once is compiled
    assert calls_of(read) < MOST_CALLS_OF_A_HEAD


def test_the_thread_rests_when_its_budget_is_used_up() -> None:
    now = used = 0.0
    budget = CpuBudget(lambda: now, lambda: used, share=0.1, burst=1.0)
    used = 1.0
    assert budget.debt() == 0.0
    used = 1.5
    assert budget.debt() == pytest.approx(5.0)
    now = 5.0
    assert budget.debt() == pytest.approx(0.0)
    now, used = 100.0, 1.5
    assert budget.debt() == 0.0
    used = 2.6
    assert budget.debt() == pytest.approx(1.0)


async def test_one_value_serves_all_and_the_next_comes_later_if_it_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = 0.0, 0

    async def make() -> int:
        nonlocal now, made
        made += 1
        now += 0.5
        return made

    monkeypatch.setattr(latest, "EVERY_SECONDS", 1.0)
    monkeypatch.setattr(latest, "REST", 20.0)
    values = Latest(make, asyncio.get_running_loop(), lambda: now)
    assert set(await asyncio.gather(*[values.get() for _ in range(50)])) == {1}
    now = 10.4
    assert await values.get() == 1
    now = 10.5
    assert await values.get() == 2


class Snapshots:
    """Snapshots that count the pictures that are made of them."""

    def __init__(self) -> None:
        self.num_pictures = 0
        self.current = self.new()

    def new(self) -> Any:
        async def picture(request: StatusRequest) -> Any:
            self.num_pictures += 1
            return SimpleNamespace(accumulators=(), parameters=(), name=request.name_contains)

        return SimpleNamespace(picture=picture)

    async def get(self) -> Any:
        return self.current


async def test_different_queries_are_limited() -> None:
    snapshots: Any = Snapshots()
    pictures = Pictures(snapshots, most=3)
    requests = [StatusRequest(name_contains=str(each)) for each in range(3)]
    for _ in range(5):
        made = await asyncio.gather(*map(pictures.json, requests))
    assert [json.loads(each)["name"] for each in made] == ["0", "1", "2"]
    assert snapshots.num_pictures == 3
    with pytest.raises(ResourceExhaustedError, match="too many different queries"):
        await pictures.json(StatusRequest(name_contains="3"))
    snapshots.current = snapshots.new()
    assert await pictures.json(StatusRequest(name_contains="3"))
    few_bytes = Pictures(snapshots, most_bytes=1)
    await few_bytes.json(requests[0])
    with pytest.raises(ResourceExhaustedError):
        await few_bytes.json(requests[1])


def test_bodies_that_nobody_reads_are_limited() -> None:
    unsent = UnsentBodies(10)
    same, other = bytes(8), bytes(3)
    with ExitStack() as sending:
        for _ in range(5):
            sending.enter_context(unsent.hold(same))
        with pytest.raises(ResourceExhaustedError), unsent.hold(other):
            pass
        assert unsent.num_bytes == 8
    assert unsent.num_bytes == 0
    with unsent.hold(other):
        assert unsent.num_bytes == 3


@pytest.mark.parametrize("encrypted", [False, True])
async def test_silent_connections_count_before_their_handshake_and_make_way(
    certificates: Certificates, encrypted: bool
) -> None:
    tls = None
    if encrypted:
        own = server_certificates(certificates.config().tls)
        assert own is not None
        tls = context_of(own)
    async with serving(said, tls) as port:
        with ExitStack() as silent:
            clients = [silent.enter_context(socket.create_connection(port.address)) for _ in range(MOST_CONNECTIONS)]
            await eventually_async(port.num_connections, MOST_CONNECTIONS.__eq__)
            trusting = ssl.create_default_context(cafile=str(certificates.ca)) if encrypted else None
            reader, writer = await asyncio.open_connection(
                *port.address, ssl=trusting, server_hostname="localhost" if encrypted else None
            )
            writer.write(b"GET /newcomer HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"\r\n\r\n/newcomer")
            writer.close()
            clients[0].settimeout(PATIENCE_SECONDS)
            assert await asyncio.to_thread(clients[0].recv, 1) == b""
            assert port.port.num_connections <= MOST_CONNECTIONS
        await eventually_async(port.num_connections, (0).__eq__)


async def test_connections_beyond_the_limit_are_refused_while_all_others_are_served() -> None:
    go_on = asyncio.Event()

    async def wait(request: Any) -> Answer:
        await go_on.wait()
        return await said(request)

    async with serving(wait) as port:
        with ExitStack() as using:
            for _ in range(MOST_CONNECTIONS):
                using.enter_context(socket.create_connection(port.address)).sendall(HEAD + b"\r\n")
            await eventually_async(port.num_connections, MOST_CONNECTIONS.__eq__)
            reader, writer = await asyncio.open_connection(*port.address)
            assert await reader.read() == b""
            writer.close()
            go_on.set()


class NoDescriptorLeft:
    """A listening socket of a process that may open no more files."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def accept(self) -> Any:
        self.tries -= 1
        if self.tries < 0:
            raise asyncio.CancelledError
        raise OSError(errno.EMFILE, "too many open files")


async def test_a_lack_of_descriptors_is_logged_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port: Any = HttpPort(cast("Any", None), None)
    monkeypatch.setattr(port, "_pause", lambda _: None)
    for _ in range(100):
        port._accept(NoDescriptorLeft(1))
    monkeypatch.setattr(listener, "_PAUSE_SECONDS", 0.0)
    sockets: Any = listener.SocketListener(cast("Any", None), 1.0)
    with suppress(asyncio.CancelledError):
        await sockets._accept(NoDescriptorLeft(100))
    assert [each.getMessage() for each in caplog.records] == ["cannot accept a connection: too many open files"] * 2


@pytest.mark.parametrize(
    ("limit", "sent"),
    [("HEAD_SECONDS", b"GET / HT"), ("IDLE_SECONDS", HEAD + b"\r\nGET"), ("PIECE_SECONDS", HEAD + b"\r\n")],
)
async def test_who_is_too_slow_is_left(monkeypatch: pytest.MonkeyPatch, limit: str, sent: bytes) -> None:
    async def much(_request: Any) -> Answer:
        return Answer(200, bytes(64 << 20 if limit == "PIECE_SECONDS" else 10))

    monkeypatch.setattr(connections, limit, 0.01)
    async with serving(much) as port:
        with socket.create_connection(port.address) as client:
            client.sendall(sent)
            await eventually_async(port.num_connections, (1).__eq__)
            await eventually_async(port.num_connections, (0).__eq__)


def test_streams_end_when_the_server_stops() -> None:
    with ExitStack() as viewers:
        with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
            viewer = viewers.enter_context(closing(connect(url_of(server))))
            viewer.request("GET", "/api/events")
            response = viewer.getresponse()
            assert response.readline().startswith(b"data: ")
        response.read()  # whole: it was ended, not cut
