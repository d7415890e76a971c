"""A relay that passes TCP connections on with a delay, for kernels that cannot delay packets themselves (netem)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Self

_READ_BYTES = 1 << 18
_START_SECONDS = 30.0


class DelayLine:
    """Pieces of data that come out some time after they went in, in the same order.

    At most `capacity` bytes are under way; a piece goes in when there is room for some of it.
    """

    def __init__(self, delay: float, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._delay = delay
        self._capacity = capacity
        self._clock = clock
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._num_bytes = 0

    def is_full(self) -> bool:
        """Returns True if nothing may go in for now."""
        return self._num_bytes >= self._capacity

    def wait(self) -> float | None:
        """Returns the seconds until a piece comes out; None if there is none."""
        return max(self._pieces[0][0] - self._clock(), 0.0) if self._pieces else None

    def put(self, piece: bytes) -> None:
        """Takes a piece in; an empty one marks the end."""
        self._pieces.append((self._clock() + self._delay, piece))
        self._num_bytes += len(piece)

    def get(self) -> bytes:
        """Returns the next piece, which must be due."""
        _, piece = self._pieces.popleft()
        self._num_bytes -= len(piece)
        return piece


class DelayingRelay:
    """Listens on some ports, in a thread, and passes connections on to the same ports of another host."""

    def __init__(self, host: str, target: str, ports: Iterable[int], delay: float, capacity: int) -> None:
        self._host, self._target, self._ports = host, target, tuple(ports)
        self._delay, self._capacity = delay, capacity
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="delaying-relay")
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise TimeoutError("the relay did not start")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            try:
                for port in self._ports:
                    server = await asyncio.start_server(self._accepting(port), self._host, port, limit=_READ_BYTES)
                    stack.callback(server.close)
            except OSError as error:
                self._failure = error
            self._ready.set()
            if self._failure is None:
                await self._stop.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepting(
        self, port: int
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    await self._pass_on(port, reader, writer)
                except* OSError:
                    pass  # one side broke the connection; the other learns of it below
            writer.transport.abort()

        return accept

    async def _pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        further, back = await asyncio.open_connection(self._target, port, limit=_READ_BYTES)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, back))
                tasks.create_task(self._pump(further, writer))
        finally:
            back.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one direction on, to its end."""
        line = DelayLine(self._delay, self._capacity)
        changed = asyncio.Condition()

        async def take_in() -> None:
            piece = b"more"
            while piece:
                piece = await reader.read(_READ_BYTES)
                async with changed:
                    await changed.wait_for(lambda: not line.is_full())
                    line.put(piece)
                    changed.notify_all()

        async def give_out() -> None:
            while True:
                async with changed:
                    await changed.wait_for(lambda: line.wait() is not None)
                await asyncio.sleep(line.wait() or 0.0)
                async with changed:
                    piece = line.get()
                    changed.notify_all()
                if not piece:
                    writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take_in())
            tasks.create_task(give_out())
