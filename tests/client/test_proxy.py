"""HTTP proxies of the environment: not for loopback addresses and Unix sockets, and named in errors elsewhere."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from click.testing import CliRunner

import gradserve
import gradserve.aio
from gradserve.testing import ServerProcess
from gradserve.transport.route import PROXY_VARIABLES, Route
from gradserve_protocol.address import Address
from gradserve_server.commands.cli import cli
from tests.servers.connecting import connect_with, connect_with_aio, without_retries
from tests.servers.polling import PATIENCE_SECONDS

ELSEWHERE = "server.example:50051"
PROXY = {"http_proxy": "http://proxy.example:3128"}


def proxy_of(host: str, environment: dict[str, str]) -> str | None:
    proxy = Route.to(Address(host, 50051), environment).proxy
    return None if proxy is None else str(proxy)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"http_proxy": "http://a:1"}, "http_proxy=http://a:1"),
        ({"http_proxy": "http://a:1", "https_proxy": "http://b:1"}, "https_proxy=http://b:1"),
        ({"https_proxy": "http://b:1", "grpc_proxy": "http://c:1"}, "grpc_proxy=http://c:1"),
        ({"http_proxy": "http://a:1", "grpc_proxy": ""}, None),
        ({"http_proxy": "http://user:secret@a:1/path"}, "http_proxy=http://a:1"),
        ({"http_proxy": "http://us@er:sec@ret@a:1"}, "http_proxy=http://a:1"),
        ({"http_proxy": "https://a:1"}, None),
        ({"http_proxy": "a:1"}, None),
        ({"http_proxy": "http://"}, None),
        ({"HTTP_PROXY": "http://a:1"}, None),
        ({"all_proxy": "http://a:1"}, None),
    ],
)
def test_where_the_proxy_comes_from(environment: dict[str, str], expected: str | None) -> None:
    assert proxy_of("server.example", environment) == expected


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost",
        "localhost.",
        "a.localhost",
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "0:0:0:0:0:0:0:1",
    ],
)
def test_loopback_has_none(host: str) -> None:
    assert proxy_of(host, PROXY) is None
    assert Route.to(Address(host, 1), PROXY).options == (("grpc.enable_http_proxy", 0),)


@pytest.mark.parametrize("host", ["server", "localhost.example", "notlocalhost", "128.0.0.1", "10.0.0.1", "::2"])
def test_elsewhere_has_one(host: str) -> None:
    assert proxy_of(host, PROXY) == "http_proxy=http://proxy.example:3128"
    assert Route.to(Address(host, 1), PROXY).options == ()


def test_a_unix_socket_has_none() -> None:
    assert Route.to(Address(path="/run/socket"), PROXY).proxy is None


@pytest.mark.parametrize(
    ("host", "exceptions", "is_excepted"),
    [
        ("server.example", {"no_proxy": "server.example"}, True),
        ("server.example", {"no_proxy": "other, .EXAMPLE"}, True),
        ("server.example", {"no_proxy": "example"}, True),
        ("server.example", {"no_proxy": ",other,"}, False),
        ("server.example", {"no_proxy": ""}, False),
        ("server.example", {"no_proxy": "server.example", "no_grpc_proxy": "other"}, False),
        ("server.example", {"no_grpc_proxy": "server.example"}, True),
        ("server.example", {"no_proxy": "*"}, False),
        ("10.1.2.3", {"no_proxy": "10.0.0.0/8"}, True),
        ("10.1.2.3", {"no_proxy": "10.0.0.1/8"}, True),
        ("11.1.2.3", {"no_proxy": "10.0.0.0/8"}, False),
        ("fd00::1", {"no_proxy": "fd00::/8"}, True),
        ("10.1.2.3", {"no_proxy": "10.0.0.0/nine"}, False),
        ("10.1.2.3", {"no_proxy": "fd00::/8"}, False),
    ],
)
def test_exceptions_are_those_of_grpc(host: str, exceptions: dict[str, str], is_excepted: bool) -> None:
    assert (proxy_of(host, {**PROXY, **exceptions}) is None) == is_excepted


class ConnectProxy:
    """An HTTP proxy on a free port of 127.0.0.1, which connects whoever asks to one server, wherever they want to go.

    Attributes:
        asked: What it was asked to connect to so far.
    """

    def __init__(self, server_address: str, answer: str = "200 OK") -> None:
        self.address = ""
        self.asked: list[str] = []
        self._host, _, self._port = server_address.rpartition(":")
        self._answer = answer
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="connect-proxy")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(request.split()[1].decode())
            writer.write(f"HTTP/1.1 {self._answer}\r\n\r\n".encode())
            server_reader, server_writer = await asyncio.open_connection(self._host, int(self._port))
            try:
                await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
            finally:
                server_writer.close()
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()


@pytest.fixture
def proxy(server_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    """The proxy that all of the variables name, with a user and a password."""
    with ConnectProxy(server_address) as running:
        for variable in PROXY_VARIABLES:
            monkeypatch.setenv(variable, f"http://user:secret@{running.address}")
        yield running


async def test_what_is_here_is_reached_without(proxy: ConnectProxy, server_address: str) -> None:
    port = server_address.rpartition(":")[2]
    for address in (server_address, f"localhost:{port}"):
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            await asyncio.to_thread(client.server_info)
        async with gradserve.aio.connect(address, timeout=PATIENCE_SECONDS) as aio_client:
            await aio_client.server_info()
        for command in ("health", "info"):
            result = CliRunner().invoke(cli, [command, address])
            assert result.exit_code == 0, result.output
    assert proxy.asked == []


def test_a_unix_socket_is_reached_without(proxy: ConnectProxy, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with ServerProcess(tmp_path, "--warm-up", "false", listen=(address,)), gradserve.connect(address) as client:
        client.server_info()
    assert proxy.asked == []


async def test_what_is_elsewhere_is_reached_through_it(proxy: ConnectProxy) -> None:
    with gradserve.connect(ELSEWHERE, timeout=PATIENCE_SECONDS) as client:
        await asyncio.to_thread(client.server_info)
    async with gradserve.aio.connect(ELSEWHERE, timeout=PATIENCE_SECONDS) as aio_client:
        await aio_client.server_info()
    assert set(proxy.asked) == {ELSEWHERE}


async def test_an_error_names_it_without_the_password(server_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ConnectProxy(server_address, answer="403 Forbidden") as refusing:
        monkeypatch.setenv("http_proxy", f"http://user:secret@{refusing.address}")
        monkeypatch.delenv("grpc_proxy", raising=False)
        monkeypatch.delenv("https_proxy", raising=False)
        expected = f"; the connection goes through the proxy of http_proxy=http://{refusing.address}"
        said: list[str] = []
        with (
            connect_with(ELSEWHERE, without_retries(PATIENCE_SECONDS)) as client,
            pytest.raises(gradserve.UnavailableError) as raised,
        ):
            await asyncio.to_thread(client.server_info)
        said.append(str(raised.value))
        aio_client = connect_with_aio(ELSEWHERE, without_retries(PATIENCE_SECONDS))
        with pytest.raises(gradserve.UnavailableError) as raised:
            await aio_client.server_info()
        said.append(str(raised.value))
        await aio_client.close()
        health = await asyncio.to_thread(CliRunner().invoke, cli, ["health", ELSEWHERE, "--timeout", "60"])
        said.append(health.output.strip())
    for message in said:
        assert message.removesuffix(" [GS_NO_CONNECTION]").endswith(expected)
        assert "403" in message
        assert "secret" not in message
