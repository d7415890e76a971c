"""The relay delays what goes through it, and changes nothing else."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from benchmarks.harness.links.relay import DelayingRelay, DelayLine
from tests.servers.polling import PATIENCE_SECONDS

_CAPACITY = 100_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pieces_come_out_later_in_the_same_order() -> None:
    clock = Clock()
    line = DelayLine(0.5, _CAPACITY, clock)
    assert line.wait() is None
    line.put(b"first")
    clock.now += 0.125
    line.put(b"second")
    assert line.wait() == 0.375
    clock.now += 0.375
    assert line.wait() == 0
    assert line.get() == b"first"
    assert line.wait() == 0.125
    clock.now += 5
    assert line.wait() == 0
    assert line.get() == b"second"
    assert line.wait() is None


def test_a_line_is_full_until_something_comes_out() -> None:
    line = DelayLine(0.5, 10)
    line.put(b"123456789")
    assert not line.is_full()
    line.put(b"more than fits")
    assert line.is_full()
    line.get()
    assert line.is_full()
    line.get()
    assert not line.is_full()


class Echo:
    """A server that sends everything back, to the end.

    Attributes:
        connections: What serves connections, ended or not.
    """

    def __init__(self) -> None:
        self.connections: list[asyncio.Task[None]] = []

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of an echo on 127.0.0.2, to which a relay on 127.0.0.3 passes connections on."""
    echo = Echo()
    server = await asyncio.start_server(echo, "127.0.0.2", 0)
    number = server.sockets[0].getsockname()[1]
    async with server:
        with DelayingRelay("127.0.0.3", "127.0.0.2", (number,), 0.01, _CAPACITY):
            yield number
        await asyncio.gather(*echo.connections)


async def test_bytes_arrive_unchanged_and_ends_do_too(port: int) -> None:
    data = random.Random(0).randbytes(20 * _CAPACITY)
    reader, writer = await asyncio.open_connection("127.0.0.3", port)
    async with asyncio.timeout(PATIENCE_SECONDS):
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data
    writer.close()


async def test_a_connection_that_breaks_is_not_the_end(port: int) -> None:
    _, broken = await asyncio.open_connection("127.0.0.3", port)
    broken.write(bytes(_CAPACITY))
    broken.transport.abort()
    reader, writer = await asyncio.open_connection("127.0.0.3", port)
    async with asyncio.timeout(PATIENCE_SECONDS):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
    writer.close()


async def test_a_port_that_is_taken(port: int) -> None:
    relay = DelayingRelay("127.0.0.3", "127.0.0.2", (port,), 0.01, _CAPACITY)
    with pytest.raises(OSError, match="address already in use"), relay:
        pytest.fail("the port is taken")
