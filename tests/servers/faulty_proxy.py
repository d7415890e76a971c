"""A proxy that fails as networks do: it cuts connections, loses or delays what they carry, or falls silent."""

import asyncio
import contextlib
import os
import random
import shutil
import socket
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

from tests.servers.polling import PATIENCE_SECONDS

_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
_LATE_SECONDS = 0.1
"""How long a late request waits at most for others to go before it."""


class Fault(Enum):
    """How a connection ends."""

    CUT_REQUEST = "the connection is cut in the middle of the request"
    CUT_AFTER_REQUEST = "the request goes through, then the connection is cut"
    LATE_REQUEST = "the client's side is cut, and the request goes through later, behind another one"
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
    """Listens in a thread of its own, and passes on what comes to another address.

    Attributes:
        address: Where it listens: a free port of 127.0.0.1, or a path if that is what it passes everything on to.
    """

    def __init__(self, target: str, faults: Faults | None = None) -> None:
        """Takes the "HOST:PORT" or the path of a Unix socket to pass everything on to."""
        self._target = target
        self.faults = faults if faults is not None else Faults()
        self._random = random.Random(self.faults.seed)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="faulty-proxy")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._flowing: asyncio.Event
        self._traffic: asyncio.Event
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

    async def flowing(self) -> None:
        """Returns when traffic is passed on, which this is."""
        await self._flowing.wait()
        self._traffic.set()

    async def others(self) -> None:
        """Returns when something else was passed on, or nothing is for a while."""
        self._traffic.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_SECONDS):
                await self._traffic.wait()

    @property
    def _is_unix(self) -> bool:
        return self._target.startswith("/")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._flowing, self._traffic = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._flowing.set()
        folder = Path(tempfile.mkdtemp())
        with self._socket() as listening:
            if self._is_unix:
                self.address = str(folder / "socket")
                listening.bind(self.address)
            else:
                listening.bind(("127.0.0.1", 0))
                self.address = f"127.0.0.1:{listening.getsockname()[1]}"
            listening.listen()
            accepting = asyncio.create_task(self._accept(listening))
            self._ready.set()
            await self._stop.wait()
            await _cancelled(accepting)
        await _cancelled(*self._tasks)
        shutil.rmtree(folder)

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listening)
            client.setblocking(False)
            task = asyncio.create_task(self._connect(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket) -> None:
        with client, self._socket() as server, contextlib.suppress(OSError):
            if not self._is_cut:
                await self._loop.sock_connect(server, self._target_address())
                await self._carry(_End(client), _End(server))

    async def _carry(self, client: "_End", server: "_End") -> None:
        connection = _Connection(self, self._draw_reads(), self._random.choice(list(Fault)))
        directions = [
            asyncio.create_task(connection.pass_requests(client, server)),
            asyncio.create_task(connection.pass_replies(server, client)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(*directions)

    def _draw_reads(self) -> float:
        mean = self.faults.mean_reads
        return float("inf") if mean is None else self._random.expovariate(1 / mean)

    def _socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX if self._is_unix else socket.AF_INET)
        made.setblocking(False)
        return made

    def _target_address(self) -> str | tuple[str, int]:
        host, _, port = self._target.rpartition(":")
        return self._target if self._is_unix else (host, int(port))


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class _Piece:
    """What one system call received.

    Attributes:
        data: The bytes.
        descriptors: The descriptors that came with them, which are closed once they are sent.
    """

    data: bytes
    descriptors: tuple[int, ...] = ()

    @property
    def first_half(self) -> "_Piece":
        return _Piece(self.data[: len(self.data) // 2], self.descriptors)


class _End:
    """One end of a connection through the proxy."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self) -> _Piece:
        """Returns what comes next, nothing at the end."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._sock, _READ_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._readable()
            else:
                return _Piece(data, tuple(descriptors))

    async def write(self, piece: _Piece) -> None:
        """Sends a piece; its descriptors go with the first byte."""
        data = piece.data
        try:
            if piece.descriptors and data:
                data = data[socket.send_fds(self._sock, [data], piece.descriptors) :]
        finally:
            for each in piece.descriptors:
                os.close(each)
        await self._loop.sock_sendall(self._sock, data)

    def end(self) -> None:
        """Ends both directions."""
        self._sock.shutdown(socket.SHUT_RDWR)

    async def _readable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(self._sock)


class _Connection:
    def __init__(self, proxy: FaultyProxy, reads_left: float, fault: Fault) -> None:
        self._proxy = proxy
        self._reads_left = reads_left
        self._fault = fault
        self._established = False

    async def pass_requests(self, client: _End, server: _End) -> None:
        while (piece := await client.read()).data:
            await self._proxy.flowing()
            match self._fault_of(Fault.CUT_REQUEST, Fault.CUT_AFTER_REQUEST, Fault.LATE_REQUEST):
                case Fault.CUT_REQUEST:
                    return await server.write(piece.first_half)
                case Fault.CUT_AFTER_REQUEST:
                    return await server.write(piece)
                case Fault.LATE_REQUEST:
                    client.end()
                    await self._proxy.others()
                    return await server.write(piece)
            await server.write(piece)
        return None

    async def pass_replies(self, server: _End, client: _End) -> None:
        while (piece := await server.read()).data:
            await self._proxy.flowing()
            match self._fault_of(Fault.DROP_REPLY, Fault.CUT_REPLY):
                case Fault.DROP_REPLY:
                    return await client.write(_Piece(b"", piece.descriptors))
                case Fault.CUT_REPLY:
                    return await client.write(piece.first_half)
            await client.write(piece)
            self._established = True
        return None

    def _fault_of(self, *faults: Fault) -> Fault | None:
        """Counts what passes, and returns the fault that is due; only a connection that was of some use fails."""
        self._reads_left -= 1
        if self._fault not in faults or self._reads_left > 0 or not self._established:
            return None
        self._proxy.faults.happened[self._fault] += 1
        return self._fault
