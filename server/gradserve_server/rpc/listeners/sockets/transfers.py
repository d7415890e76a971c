"""Threads that move large payloads between sockets and memory."""

import asyncio
import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gradserve_protocol.frames import Buffers
from gradserve_protocol.lasting import lasting_thread
from gradserve_protocol.tls import SecureSocket

_log = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20
"""The most bytes moved for one socket before others get their turn."""
_CHECK_SECONDS = 0.5


class Job(Protocol):
    """A transfer over a non-blocking socket.

    Attributes:
        events: The event to wait for: selectors.EVENT_READ or EVENT_WRITE.
    """

    events: int

    @property
    def sock(self) -> socket.socket | SecureSocket:
        """The socket."""
        ...

    def step(self) -> int:
        """Moves up to `_STEP_BYTES`; returns how many bytes it moved.

        Raises:
            BlockingIOError: The socket is not ready.
            OSError: The connection is gone.
        """
        ...

    @property
    def is_done(self) -> bool:
        """True once everything is moved."""
        ...


class Receiving:
    """Fills memory from a socket.

    Attributes:
        num_moved: The bytes received so far.
    """

    events = selectors.EVENT_READ

    def __init__(
        self, sock: socket.socket | SecureSocket, memory: memoryview, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self.sock = sock
        self.num_moved = 0
        self._rest = memory
        self._on_bytes = on_bytes

    def step(self) -> int:
        """Reads the bytes that have arrived."""
        return self._read(_STEP_BYTES)

    def _read(self, at_most: int) -> int:
        count = self.sock.recv_into(self._rest[:at_most])
        if not count:
            raise ConnectionResetError("the client left in the middle of a payload")
        self._rest = self._rest[count:]
        self.num_moved += count
        if self._on_bytes is not None:
            self._on_bytes(count)
        return count

    @property
    def is_done(self) -> bool:
        """True once the memory is full."""
        return not self._rest


class Discarding:
    """Reads and drops a payload, so that the connection can go on."""

    events = selectors.EVENT_READ

    def __init__(self, sock: socket.socket | SecureSocket, num_bytes: int) -> None:
        self.sock = sock
        self._left = num_bytes
        self._scratch = memoryview(bytearray(min(num_bytes, 1 << 18)))

    def step(self) -> int:
        """Reads the bytes that have arrived."""
        return self._read(len(self._scratch))

    def _read(self, at_most: int) -> int:
        count = self.sock.recv_into(self._scratch[: min(self._left, at_most)])
        if not count:
            raise ConnectionResetError("the client left in the middle of a payload")
        self._left -= count
        return count

    @property
    def is_done(self) -> bool:
        """True once everything is read."""
        return not self._left


class Sending:
    """Writes pieces of memory to a socket, without copying them."""

    events = selectors.EVENT_WRITE

    def __init__(self, sock: socket.socket | SecureSocket, pieces: Sequence[bytes | memoryview]) -> None:
        self.sock = sock
        self._buffers = Buffers(pieces)

    def step(self) -> int:
        """Writes as much as there is room for."""
        count = self.sock.sendmsg(self._buffers.next(_STEP_BYTES))
        self._buffers.advance(count)
        return count

    @property
    def is_done(self) -> bool:
        """True once everything is written."""
        return not self._buffers


class InOrder:
    """Counts the bytes of a payload that have arrived without a gap, while its parts arrive at the same time.

    Safe to use from several threads.
    """

    def __init__(self, sizes: Sequence[int], on_bytes: Callable[[int], None]) -> None:
        self._left = list(sizes)
        self._ahead = [0] * len(sizes)
        self._on_bytes = on_bytes
        self._first = 0
        self._lock = threading.Lock()

    def of(self, part: int) -> Callable[[int], None]:
        """Returns a function that notes further bytes of a part."""
        return partial(self._advance, part)

    def _advance(self, part: int, num_bytes: int) -> None:
        with self._lock:
            self._ahead[part] += num_bytes
            in_order = 0
            while self._first < len(self._left):
                arrived = self._ahead[self._first]
                self._ahead[self._first] = 0
                self._left[self._first] -= arrived
                in_order += arrived
                if self._left[self._first]:
                    break
                self._first += 1
            if in_order:
                self._on_bytes(in_order)


class _Entry:
    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.answer: asyncio.Future[None] = loop.create_future()
        self.is_cancelled = False
        self.last_progress = time.monotonic()
        self._loop = loop

    def end(self, error: BaseException | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)


class _Mover:
    """A thread that advances transfers as their sockets allow."""

    def __init__(self, name: str, idle_seconds: float) -> None:
        self.num_jobs = 0
        self._idle_seconds = idle_seconds
        self._arrived: deque[_Entry | None] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._entries: set[_Entry] = set()
        self._next_check = 0.0
        self._is_closing = False
        self._thread = lasting_thread("moving payloads", self._run, _log, name)

    def submit(self, entry: _Entry | None) -> None:
        """Hands over a transfer, or again one that was cancelled. None ends the thread."""
        self._arrived.append(entry)
        with contextlib.suppress(BlockingIOError):  # it is awake already
            os.write(self._wake_write, b"\0")

    def join(self) -> None:
        """Waits for the thread to end, after None was submitted."""
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        while not self._is_closing:
            self._turn()
        for entry in [*self._entries, *filter(None, self._arrived)]:
            self._end(entry, ConnectionAbortedError("the server is shutting down"))
        self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_CHECK_SECONDS if self._entries else None):
            if key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            else:
                self._advance(key.data)
        while self._arrived:
            entry = self._arrived.popleft()
            if entry is None:
                self._is_closing = True
                return
            if entry.is_cancelled:
                if entry in self._entries or not entry.answer.done():
                    self._end(entry, ConnectionAbortedError("the transfer was given up"))
                continue
            self._entries.add(entry)
            self._selector.register(entry.job.sock, entry.job.events, entry)
            self._advance(entry)
        self._end_silent()

    def _advance(self, entry: _Entry) -> None:
        try:
            entry.job.step()
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            self._end(entry, error.with_traceback(None))  # it has this frame, and thus the entry: a cycle
            return
        entry.last_progress = time.monotonic()
        if entry.job.is_done:
            self._end(entry)

    def _end_silent(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        for entry in [each for each in self._entries if now - each.last_progress > self._idle_seconds]:
            self._end(entry, TimeoutError(f"the connection was silent for more than {self._idle_seconds:g} s"))

    def _end(self, entry: _Entry, error: BaseException | None = None) -> None:
        try:
            if entry in self._entries:
                self._entries.discard(entry)
                self._selector.unregister(entry.job.sock)
        finally:
            entry.end(error)  # whatever happens, because its caller waits


class Transfers:
    """A few threads that move payloads for any number of slow connections.

    The system calls release the GIL, so the event loop keeps running.
    """

    def __init__(self, num_threads: int, idle_seconds: float) -> None:
        self._movers = [_Mover(f"gradserve-transfer-{index}", idle_seconds) for index in range(num_threads)]

    async def run(self, job: Job) -> None:
        """Runs a transfer. If the caller is cancelled, its memory is no longer touched once this returns.

        Raises:
            OSError: The connection is gone, or was silent for too long (TimeoutError).
        """
        if job.is_done:
            return
        mover = min(self._movers, key=lambda each: each.num_jobs)
        entry = _Entry(job, asyncio.get_running_loop())
        mover.num_jobs += 1
        try:
            mover.submit(entry)
            await asyncio.shield(entry.answer)
        except asyncio.CancelledError:
            entry.is_cancelled = True
            mover.submit(entry)
            while not entry.answer.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([entry.answer])
            entry.answer.exception()
            raise
        finally:
            mover.num_jobs -= 1
            del entry  # it has the error, whose traceback gets this frame

    def close(self) -> None:
        """Ends running transfers and the threads."""
        for mover in self._movers:
            mover.submit(None)
        for mover in self._movers:
            mover.join()
