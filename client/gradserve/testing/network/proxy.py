"""A proxy that fails as networks do: it cuts connections, loses or delays what they carry, or falls silent."""

import asyncio
import contextlib
import random
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from gradserve.testing.network.connection import Connection, Traffic
from gradserve.testing.network.end import End
from gradserve.testing.network.faults import ConnectionFault, ConnectionFaults

_START_SECONDS = 60.0


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
        """Passes on what was held back, and what comes from now on."""

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
            accepting = asyncio.create_task(self._accept(listening))
            self._ready.set()
            await self._stop.wait()
            await _cancelled(accepting)
            await _cancelled(*self._tasks)

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
