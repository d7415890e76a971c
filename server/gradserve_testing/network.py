"""A proxy that fails like a network: it cuts connections, loses or delays their traffic, or falls silent."""

import asyncio
import contextlib
import os
import random
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
_LATE_SECONDS = 0.1
"""The most seconds that a late request waits for another to overtake it."""
_START_SECONDS = 60.0


class ConnectionFault(Enum):
    """A way for a connection to fail."""

    CUT_REQUEST = "the connection is cut in the middle of the request"
    CUT_AFTER_REQUEST = "the request goes through, then the connection is cut"
    LATE_REQUEST = "the client's side is cut, and the request goes through later, behind another one"
    DROP_REPLY = "the connection is cut when the reply comes, and nothing of it is forwarded"
    CUT_REPLY = "the connection is cut in the middle of the reply"


@dataclass
class ConnectionFaults:
    """Random failures of connections.

    Attributes:
        mean_reads: The average number of pieces of traffic before a connection fails; None if none fails.
        seed: The seed of the random numbers.
        happened: The number of connections with each fault.
    """

    mean_reads: float | None = None
    seed: int = 0
    happened: Counter[ConnectionFault] = field(default_factory=Counter)


_OF_REQUESTS = (ConnectionFault.CUT_REQUEST, ConnectionFault.CUT_AFTER_REQUEST, ConnectionFault.LATE_REQUEST)


@dataclass(frozen=True)
class Piece:
    """The result of one receiving system call.

    Attributes:
        data: The bytes.
        descriptors: The descriptors that came with them; closed once they are sent.
    """

    data: bytes
    descriptors: tuple[int, ...] = ()

    @property
    def first_half(self) -> "Piece":
        """The first half of the bytes, and all descriptors."""
        return Piece(self.data[: len(self.data) // 2], self.descriptors)


class End:
    """One end of a connection through the proxy."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self) -> Piece:
        """Returns the next piece; an empty one at the end."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._sock, _READ_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._readable()
            else:
                return Piece(data, tuple(descriptors))

    async def write(self, piece: Piece) -> None:
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


class Traffic:
    """The traffic of all connections of a proxy. Belongs to the event loop on which it was made."""

    def __init__(self) -> None:
        self._may_pass, self._passed = asyncio.Event(), asyncio.Event()
        self._may_pass.set()

    def stop(self) -> None:
        """Holds back all traffic."""
        self._may_pass.clear()

    def go_on(self) -> None:
        """Releases traffic that was held back, and lets later traffic pass."""
        self._may_pass.set()

    async def passing(self) -> None:
        """Waits until a piece may pass."""
        await self._may_pass.wait()
        self._passed.set()

    async def others(self) -> None:
        """Waits until another piece has passed, or for a short time."""
        self._passed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_SECONDS):
                await self._passed.wait()


class Connection:
    """Forwards the traffic of both sides until its fault is due.

    A connection fails only after it has carried a reply.
    """

    def __init__(self, traffic: Traffic, faults: ConnectionFaults, reads_left: float, fault: ConnectionFault) -> None:
        self._traffic = traffic
        self._faults = faults
        self._reads_left = reads_left
        self._fault = fault
        self._established = False

    async def pass_requests(self, client: End, server: End) -> None:
        """Forwards the client's traffic."""
        while (piece := await client.read()).data:
            await self._traffic.passing()
            match self._fault_of(*_OF_REQUESTS):
                case ConnectionFault.CUT_REQUEST:
                    return await server.write(piece.first_half)
                case ConnectionFault.CUT_AFTER_REQUEST:
                    return await server.write(piece)
                case ConnectionFault.LATE_REQUEST:
                    client.end()
                    await self._traffic.others()
                    return await server.write(piece)
            await server.write(piece)
        return None

    async def pass_replies(self, server: End, client: End) -> None:
        """Forwards the server's traffic."""
        while (piece := await server.read()).data:
            await self._traffic.passing()
            match self._fault_of(ConnectionFault.DROP_REPLY, ConnectionFault.CUT_REPLY):
                case ConnectionFault.DROP_REPLY:
                    return await client.write(Piece(b"", piece.descriptors))
                case ConnectionFault.CUT_REPLY:
                    return await client.write(piece.first_half)
            await client.write(piece)
            self._established = True
        return None

    def _fault_of(self, *faults: ConnectionFault) -> ConnectionFault | None:
        """Counts a piece, and returns the fault that is due."""
        self._reads_left -= 1
        if self._fault not in faults or self._reads_left > 0 or not self._established:
            return None
        self._faults.happened[self._fault] += 1
        return self._fault


class FaultyProxy:
    """A network between a server and its clients: a proxy in a thread of its own.

    with FaultyProxy(server.address) as network, gradserve.connect(network.address, transport="grpc") as client:
        network.partition()

    Only gRPC takes this way. Clients reach the sockets beside it directly, unless `transport="grpc"` keeps them off
    these, or the server has none (`bulk_listen="off"`, `shared_memory_socket="off"`).

    Attributes:
        address: The address for clients: a free port of 127.0.0.1, or a path if the target is one.
        faults: When connections fail by themselves, and how often they did.
    """

    def __init__(self, target: str, faults: ConnectionFaults | None = None) -> None:
        """Makes a network, which begins with the block.

        Args:
            target: "HOST:PORT", or the path of a Unix socket.
            faults: When connections fail by themselves; by default they do not.
        """
        self._target = target
        self.faults = faults if faults is not None else ConnectionFaults()
        self._random = random.Random(self.faults.seed)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="faulty-proxy")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._traffic: Traffic
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self.address = ""

    def partition(self) -> None:
        """Keeps all connections, accepts new ones, and passes nothing on from now until the network heals."""
        self._do(self._traffic.stop)

    def heal(self) -> None:
        """Releases traffic that was held back, and lets later traffic pass."""

        def flow() -> None:
            self._is_cut = False
            self._traffic.go_on()

        self._do(flow)

    def cut(self) -> None:
        """Ends all connections, and those that come until the network heals."""

        def cancel() -> None:
            self._is_cut = True
            for task in self._tasks:
                task.cancel()

        self._do(cancel)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def _is_unix(self) -> bool:
        return self._target.startswith("/")

    def _do(self, change: Callable[[], None]) -> None:
        """Changes something on the event loop; returns when it is done."""

        async def on_loop() -> None:
            change()

        asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(_START_SECONDS)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._traffic = asyncio.Event(), Traffic()
        with tempfile.TemporaryDirectory() as folder, self._socket() as listening:
            if self._is_unix:
                self.address = str(Path(folder) / "socket")
                listening.bind(self.address)
            else:
                listening.bind(("127.0.0.1", 0))
                self.address = f"127.0.0.1:{listening.getsockname()[1]}"
            listening.listen()
            self._loop.add_reader(listening, self._accept, listening)
            self._ready.set()
            await self._stop.wait()
            self._loop.remove_reader(listening)
            await _cancelled(*self._tasks)

    def _accept(self, listening: socket.socket) -> None:
        try:
            client, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.setblocking(False)
        task = asyncio.create_task(self._connect(client))
        self._tasks.add(task)

        def end(_: object) -> None:
            client.close()  # here, as a task that is cancelled before it begins does nothing
            self._tasks.discard(task)

        task.add_done_callback(end)

    async def _connect(self, client: socket.socket) -> None:
        with self._socket() as server, contextlib.suppress(OSError):
            if not self._is_cut:
                await self._loop.sock_connect(server, self._target_address())
                await self._carry(End(client), End(server))

    async def _carry(self, client: End, server: End) -> None:
        connection = Connection(
            self._traffic, self.faults, self._draw_reads(), self._random.choice(list(ConnectionFault))
        )
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
