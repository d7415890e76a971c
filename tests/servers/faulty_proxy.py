"""A TCP proxy that fails as networks do: it cuts connections and loses replies, or falls silent."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from tests.servers.polling import PATIENCE_SECONDS

_READ_BYTES = 1 << 16


class Fault(Enum):
    """How a connection ends."""

    CUT_AFTER_REQUEST = "the request goes through, then the connection is cut"
    DROP_REPLY = "the connection is cut when the reply comes, of which nothing is passed on"
    CUT_REPLY = "the connection is cut in the middle of the reply"


@dataclass
class Faults:
    """When connections fail.

    Attributes:
        mean_reads: How many pieces of traffic a connection carries before it fails, on average; None for no end.
        seed: Of the random numbers.
        happened: How often each fault was done to a connection.
    """

    mean_reads: float | None = None
    seed: int = 0
    happened: Counter[Fault] = field(default_factory=Counter)


class FaultyProxy:
    """Listens on a free port of 127.0.0.1, in a thread of its own, and passes on what comes to another address."""

    def __init__(self, target: str, faults: Faults | None = None) -> None:
        """Takes the "HOST:PORT" to pass everything on to."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.faults = faults if faults is not None else Faults()
        self._random = random.Random(self.faults.seed)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="faulty-proxy")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._flowing: asyncio.Event
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self.address = ""

    def freeze(self) -> None:
        """Keeps all connections, accepts new ones, and passes nothing on any more."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def cut(self) -> None:
        """Ends all connections, and those that come later."""

        def cancel() -> None:
            self._is_cut = True
            for task in self._tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(PATIENCE_SECONDS):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._flowing = asyncio.Event(), asyncio.Event()
        self._flowing.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        # Connections that were accepted in this moment get their task.
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # A cancelled handler would be reported by asyncio as an error.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            async with _closing(writer):
                if self._is_cut:
                    return
                server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
                async with _closing(server_writer):
                    await self._carry(reader, writer, server_reader, server_writer)
        self._tasks.discard(task)

    async def _carry(
        self,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        connection = _Connection(self, self._draw_reads(), self._random.choice(list(Fault)))
        directions = [
            asyncio.create_task(connection.pass_requests(client, to_server)),
            asyncio.create_task(connection.pass_replies(server, to_client)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    def _draw_reads(self) -> float:
        mean = self.faults.mean_reads
        return float("inf") if mean is None else self._random.expovariate(1 / mean)

    async def flowing(self) -> None:
        """Returns when traffic is passed on."""
        await self._flowing.wait()


@contextlib.asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class _Connection:
    def __init__(self, proxy: FaultyProxy, reads_left: float, fault: Fault) -> None:
        self._proxy = proxy
        self._reads_left = reads_left
        self._fault = fault
        self._established = False

    async def pass_requests(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(_READ_BYTES):
            await self._proxy.flowing()
            target.write(data)
            await target.drain()
            if self._fails(Fault.CUT_AFTER_REQUEST):
                return

    async def pass_replies(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(_READ_BYTES):
            await self._proxy.flowing()
            if self._fails(Fault.DROP_REPLY):
                return
            cut = self._fails(Fault.CUT_REPLY)
            target.write(data[: len(data) // 2] if cut else data)
            await target.drain()
            if cut:
                return
            self._established = True

    def _fails(self, fault: Fault) -> bool:
        """Counts what passes; only a connection that was of some use fails."""
        self._reads_left -= 0.5 if fault is not Fault.CUT_AFTER_REQUEST else 1
        if fault is not self._fault or self._reads_left > 0 or not self._established:
            return False
        self._proxy.faults.happened[fault] += 1
        return True
