"""Frames over a non-blocking socket."""

import array
import asyncio
import os
import socket
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradserve.wire.frames import HEADER_BYTES, FrameError, FrameHeader
from gradserve_server.rpc.listeners.sockets.transfers import Discarding, Receiving, Sending, Transfers

_SMALL_BYTES = 1 << 16
"""Payloads of up to this size are moved at once: waking up a thread takes longer."""
_ONE_DESCRIPTOR = socket.CMSG_LEN(array.array("i").itemsize)
_IOV_MAX = 1024


class SilentError(Exception):
    """The client has sent a part of a frame, and then nothing for too long."""


class FrameStream:
    """Reads and writes frames. Used by one task."""

    def __init__(self, sock: socket.socket, transfers: Transfers, idle_seconds: float) -> None:
        """Takes over a connected, non-blocking socket, and how long a client may pause within a frame."""
        self._sock = sock
        self._idle_seconds = idle_seconds
        self._transfers = transfers
        self._loop = asyncio.get_running_loop()
        self._takes_descriptors = sock.family == socket.AF_UNIX
        # asyncio looks for descriptors only, and describes at length a socket that it does not find.
        self._descriptor = sock.fileno()
        self._is_listening = False
        self._reader: asyncio.Future[None] | None = None
        self._watcher: Callable[[], None] | None = None

    def close(self) -> None:
        """Closes the socket."""
        self._ignore()
        self._sock.close()

    def finish(self) -> None:
        """Closes the sending side."""
        self._sock.shutdown(socket.SHUT_WR)

    async def read_header(self) -> tuple[FrameHeader, int | None]:
        """Reads the header of the next frame; returns it with the descriptor that came along, which is the caller's.

        Raises:
            EOFError: The client has closed the connection.
            FrameError: It is no header, or there is more than one descriptor.
            SilentError: Only a part of it came.
            OSError: The connection is gone.
        """
        data = bytearray(HEADER_BYTES)
        descriptors: list[int] = []
        try:
            await self._fill_with_descriptors(memoryview(data), descriptors)
            header = FrameHeader.unpack(data)
        except BaseException:
            for each in descriptors:
                os.close(each)
            raise
        return header, descriptors[0] if descriptors else None

    async def read(self, num_bytes: int) -> memoryview:
        """Reads the next bytes, which are few.

        Raises:
            EOFError, SilentError, OSError: See `read_header`.
        """
        data = memoryview(bytearray(num_bytes))
        await self._fill(data)
        return data

    async def read_into(self, memory: NDArray[np.uint8]) -> None:
        """Fills memory with the next bytes.

        Raises:
            EOFError, SilentError, OSError: See `read_header`.
        """
        data = memory.data
        if len(data) <= _SMALL_BYTES:
            await self._fill(data)
        else:
            await self._transfer(Receiving(self._sock, data))

    async def discard(self, num_bytes: int) -> None:
        """Reads the next bytes and forgets them.

        Raises:
            EOFError, SilentError, OSError: See `read_header`.
        """
        await self._transfer(Discarding(self._sock, num_bytes))

    async def _transfer(self, job: Receiving | Discarding) -> None:
        try:
            await self._transfers.run(job)
        except TimeoutError as error:
            raise SilentError(str(error)) from None

    async def write(self, pieces: Sequence[bytes | memoryview], descriptor: int | None = None) -> None:
        """Sends bytes, and a descriptor with the first of them.

        Raises:
            OSError: The connection is gone.
        """
        ancillary = [] if descriptor is None else [_rights(descriptor)]
        num_bytes = sum(len(piece) for piece in pieces)
        sent = 0
        try:
            batch = [memoryview(piece)[:_SMALL_BYTES] for piece in pieces[:1]] if num_bytes > _SMALL_BYTES else pieces
            sent = self._sock.sendmsg(batch[:_IOV_MAX], ancillary)
        except BlockingIOError:
            if ancillary:
                await self._writable()
                return await self.write(pieces, descriptor)
        if sent < num_bytes:
            await self._transfers.run(Sending(self._sock, _after(pieces, sent)))
        return None

    def watch(self, on_event: Callable[[], None]) -> None:
        """Calls a function when the client sends something, or leaves, until `unwatch`."""
        self._watcher = on_event
        self._listen()

    def unwatch(self) -> None:
        """Ends `watch`."""
        self._watcher = None

    async def _fill(self, data: memoryview) -> None:
        while data:
            try:
                count = self._sock.recv_into(data)
            except BlockingIOError:
                await self._readable(self._idle_seconds)
                continue
            if not count:
                raise EOFError("the client left in the middle of a frame")
            data = data[count:]

    async def _fill_with_descriptors(self, data: memoryview, descriptors: list[int]) -> None:
        """Fills memory with the next bytes, and a list with the descriptors that come along."""
        is_new = True
        while data:
            try:
                count = self._receive_into(data, descriptors)
            except BlockingIOError:
                # Between two frames a client may be silent for as long as it likes.
                await self._readable(None if is_new else self._idle_seconds)
                continue
            if not count:
                raise EOFError("the client has closed the connection")
            is_new = False
            data = data[count:]

    def _receive_into(self, data: memoryview, descriptors: list[int]) -> int:
        if not self._takes_descriptors:
            return self._sock.recv_into(data)
        count, ancillary, flags, _ = self._sock.recvmsg_into([data], _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        descriptors += _descriptors(ancillary)
        if flags & socket.MSG_CTRUNC or len(descriptors) > 1:
            raise FrameError("expected at most one descriptor, got several")
        return count

    async def _readable(self, seconds: float | None) -> None:
        self._reader = self._loop.create_future()
        self._listen()
        try:
            if seconds is None:
                return await self._reader
            async with asyncio.timeout(seconds):
                return await self._reader
        except TimeoutError:
            raise SilentError(f"the connection was silent for more than {seconds:g} s") from None
        finally:
            self._reader = None

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self._descriptor, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._descriptor)

    def _listen(self) -> None:
        # The loop goes on listening between calls, which saves most of the system calls of a small one.
        if not self._is_listening:
            self._loop.add_reader(self._descriptor, self._has_bytes)
            self._is_listening = True

    def _ignore(self) -> None:
        if self._is_listening:
            self._loop.remove_reader(self._descriptor)
            self._is_listening = False

    def _has_bytes(self) -> None:
        if self._reader is not None:
            _wake(self._reader)
        elif not self._has_read_all():
            # Nobody reads them now: they would wake the loop again and again.
            self._ignore()
            if self._watcher is not None:
                self._watcher()

    def _has_read_all(self) -> bool:
        """Returns True if the loop saw bytes that have been read meanwhile."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _rights(descriptor: int) -> "tuple[int, int, array.array[int]]":
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _after(pieces: Sequence[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """Returns what is left of some pieces after their first `count` bytes."""
    left: list[bytes | memoryview] = []
    for piece in pieces:
        if count >= len(piece):
            count -= len(piece)
        else:
            left.append(memoryview(piece)[count:])
            count = 0
    return left
