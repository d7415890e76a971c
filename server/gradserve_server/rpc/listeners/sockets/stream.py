"""A stream of frames over a non-blocking socket."""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gradserve.transport.sockets.aio import all_of
from gradserve_protocol.frames import HEADER_BYTES, Buffers, FrameError, FrameHeader, FrameKind, shares, split
from gradserve_protocol.tls import SecureSocket
from gradserve_server.rpc.listeners.sockets.transfers import Discarding, InOrder, Receiving, Sending, Transfers
from gradserve_server.security.identity import PeerCertificate

_SMALL_BYTES = 1 << 16
"""Payloads of up to this size are moved on the event loop, as waking up a thread takes longer."""
_READ_BYTES = 20 << 10
"""The most that one system call reads ahead: a frame with small tensors in its message."""
_ONE_DESCRIPTOR = socket.CMSG_LEN(array.array("i").itemsize)
_CUT_OFF = int(socket.MSG_CTRUNC)
_PEER_CREDENTIALS = struct.Struct("@iII")
"""struct ucred of Linux: process, user and group."""
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_IOV_MAX = 1024
_ONLY_REGION = "expected a descriptor with REGION only"


class SilentError(Exception):
    """The client has sent a part of a frame, and then nothing for too long."""


class FrameStream:
    """Reads and writes frames. Used by one task.

    Attributes:
        strands: The further sockets over which large payloads of the current call are split.
        peer: The certificate of the client, if the server asks for one.
    """

    _receiving = Receiving
    _discarding = Discarding

    def __init__(self, sock: socket.socket, transfers: Transfers, idle_seconds: float) -> None:
        """Takes over a connected, non-blocking socket. A client may pause for `idle_seconds` within a frame."""
        self.strands: Sequence[FrameStream] = ()
        self.peer: PeerCertificate | None = None
        self._sock: socket.socket | SecureSocket = sock
        self._idle_seconds = idle_seconds
        self._transfers = transfers
        self._loop = asyncio.get_running_loop()
        self._takes_descriptors = sock.family == socket.AF_UNIX
        # asyncio wants a descriptor only, and builds a long error message for a socket that it does not know.
        self._number = sock.fileno()
        self._received = b""
        self._position = 0
        self._num_read = 0
        self._under_way: Receiving | None = None
        self._descriptor: int | None = None
        self._is_listening = False
        self._reader: asyncio.Future[None] | None = None
        self._watcher: Callable[[], None] | None = None
        self._is_writing = False

    async def open(self) -> None:
        """Prepares the connection for the first frame.

        Raises:
            EOFError, InvalidArgumentError, OSError: The connection cannot be used.
        """

    def peer_uid(self) -> int | None:
        """Returns the user at the other end according to the kernel; None over TCP."""
        return self._peer()[1]

    def peer_pid(self) -> int | None:
        """Returns the process at the other end according to the kernel; None over TCP."""
        return self._peer()[0]

    def peer_name(self) -> str:
        """Returns the name of the other end for logs: "127.0.0.1:4711", or "process 4711" for a Unix socket."""
        if self._sock.family == socket.AF_UNIX:
            return f"process {self.peer_pid()}"
        with contextlib.suppress(OSError):
            host, port, *_ = self._sock.getpeername()
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return ""

    def _peer(self) -> tuple[int | None, int | None]:
        if self._sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
            return None, None
        pid, uid, _ = _PEER_CREDENTIALS.unpack(
            self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        return pid, uid

    def close(self) -> None:
        """Closes the socket."""
        self.ignore()
        self._sock.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def finish(self) -> None:
        """Closes the sending side."""
        self._sock.shutdown(socket.SHUT_WR)

    def end_with(self, frame: bytes) -> None:
        """Sends a last, short frame and closes the sending side, unless another frame was cut short. Does not wait."""
        if not self._is_writing:
            with contextlib.suppress(OSError):  # the client does not read, or has left
                self._sock.send(frame)
                self.finish()

    async def read_header(self) -> FrameHeader:
        """Reads the header of the next frame. The descriptor of a REGION is then at `take_descriptor`.

        Raises:
            EOFError: The client has closed the connection.
            FrameError: The bytes are no header, or came with descriptors that are not allowed.
            SilentError: Only a part of the header came.
            OSError: The connection is gone.
        """
        if self._has_read_all:
            await self._more(None)  # between two frames, a client may stay silent
        while len(self._received) - self._position < HEADER_BYTES:
            await self._more(self._idle_seconds)
        start = self._position
        self._position += HEADER_BYTES
        header = FrameHeader.unpack(self._received[start : self._position])
        if self._descriptor is not None and header.kind is not FrameKind.REGION:
            # Nothing is received ahead beyond the frame with a descriptor.
            end = self._position + header.head_bytes + header.payload_bytes
            if end >= len(self._received):
                raise FrameError(_ONLY_REGION)
        return header

    def take_descriptor(self) -> int | None:
        """Returns the descriptor that came with the frame, for the caller to close; None if there is none."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    async def read(self, num_bytes: int) -> memoryview:
        """Reads the next few bytes.

        Raises:
            EOFError, SilentError, OSError: See `read_header`.
        """
        end = self._position + num_bytes
        if end <= len(self._received):
            data = memoryview(self._received)[self._position : end]
            self._position = end
            return data
        data = memoryview(bytearray(num_bytes))
        await self._fill(data)
        return data

    async def read_into(self, memory: NDArray[np.uint8], on_bytes: Callable[[int], None] | None = None) -> None:
        """Fills memory with the payload that comes next.

        Args:
            memory: The memory.
            on_bytes: Called with the number of further bytes, in any thread, unless the payload is small.

        Raises:
            EOFError, SilentError, OSError: See `read_header`.
        """
        data = memory.data
        if len(data) <= _SMALL_BYTES:
            return await self._fill(data)
        sizes = shares(len(data), len(self.strands))
        if len(sizes) == 1:
            return await self._read_share(data, on_bytes)
        in_order = None if on_bytes is None else InOrder(sizes, on_bytes)
        streams, ends = (self, *self.strands), list(accumulate(sizes))
        return await all_of(
            stream._read_share(data[end - size : end], None if in_order is None else in_order.of(index))
            for index, (stream, end, size) in enumerate(zip(streams, ends, sizes, strict=True))
        )

    async def discard(self, num_bytes: int) -> None:
        """Reads the payload that comes next, and drops it.

        Raises:
            EOFError, SilentError, OSError: See `read_header`.
        """
        sizes = shares(num_bytes, len(self.strands))
        if len(sizes) == 1:
            return await self._discard_share(num_bytes)
        return await all_of(
            stream._discard_share(size) for stream, size in zip((self, *self.strands), sizes, strict=True)
        )

    async def _read_share(self, data: memoryview, on_bytes: Callable[[int], None] | None) -> None:
        num_moved = self._move(data)
        if on_bytes is not None:
            on_bytes(num_moved)
        self._under_way = job = self._receiving(self._sock, data[num_moved:], on_bytes)
        try:
            await self._transfer(job)
        finally:
            self._num_read += job.num_moved
            self._under_way = None

    async def _discard_share(self, num_bytes: int) -> None:
        here = min(len(self._received) - self._position, num_bytes)
        self._position += here
        await self._transfer(self._discarding(self._sock, num_bytes - here))

    async def _transfer(self, job: Receiving | Discarding) -> None:
        try:
            await self._transfers.run(job)
        except TimeoutError as error:
            raise SilentError(str(error)) from None

    async def write_frame(self, head: bytes, payload: Sequence[bytes | memoryview]) -> None:
        """Sends a frame with a payload.

        Raises:
            OSError: The connection is gone.
        """
        own, *others = split(payload, len(self.strands)) if self.strands else (payload,)
        if not others:
            return await self.write([head, *own])
        return await all_of(
            stream.write(part) for stream, part in zip((self, *self.strands), ([head, *own], *others), strict=True)
        )

    async def write(self, pieces: Sequence[bytes | memoryview], descriptor: int | None = None) -> None:
        """Sends bytes, and a descriptor with the first of them.

        Raises:
            OSError: The connection is gone.
        """
        self._is_writing = True
        ancillary = [] if descriptor is None else [_rights(descriptor)]
        num_bytes = sum([len(piece) for piece in pieces])
        sent = 0
        try:
            batch = [memoryview(piece)[:_SMALL_BYTES] for piece in pieces[:1]] if num_bytes > _SMALL_BYTES else pieces
            sent = self._sock.sendmsg(batch[:_IOV_MAX], ancillary)
        except BlockingIOError:
            if ancillary:
                await self._writable()
                return await self.write(pieces, descriptor)
        if sent < num_bytes:
            unsent = Buffers(pieces)
            unsent.advance(sent)
            await self._transfers.run(Sending(self._sock, unsent.left))
        self._is_writing = False
        return None

    def num_arrived(self) -> int:
        """Returns how many bytes have arrived so far for `read` and `read_into`, of all frames."""
        streams = (self, *self.strands)
        return sum(each._num_read + (each._under_way.num_moved if each._under_way else 0) for each in streams)

    def watch(self, on_event: Callable[[], None]) -> None:
        """Calls a function when the client sends something, or leaves, until `unwatch`."""
        self._watcher = on_event
        if self._has_read_all:
            self._listen()
        else:
            self._loop.call_soon(self._tell)

    def unwatch(self) -> None:
        """Ends `watch`."""
        self._watcher = None

    def has_left(self) -> bool:
        """Returns True if the client has sent more, or has left, even if the event loop has not noticed yet."""
        return not self._has_read_all or self._is_readable()

    @property
    def has_more(self) -> bool:
        """True if bytes beyond the last frame have been received."""
        return not self._has_read_all

    @property
    def _has_read_all(self) -> bool:
        return self._position == len(self._received)

    async def _fill(self, data: memoryview) -> None:
        data = data[self._move(data) :]
        while data:
            try:
                count = self._sock.recv_into(data)
                self._num_read += count
            except BlockingIOError:
                await self._more(self._idle_seconds)
                if self._descriptor is not None:
                    raise FrameError(_ONLY_REGION) from None
                count = self._move(data)
            if not count:
                raise EOFError("the client left in the middle of a frame")
            data = data[count:]

    def _move(self, data: memoryview) -> int:
        """Moves bytes that were received ahead to the beginning of some memory; returns their number."""
        count = min(len(self._received) - self._position, len(data))
        data[:count] = memoryview(self._received)[self._position : self._position + count]
        self._position += count
        self._num_read += count
        return count

    def _receive(self) -> None:
        """Receives the next bytes ahead."""
        if self._takes_descriptors:
            assert isinstance(self._sock, socket.socket)
            data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, _ONE_DESCRIPTOR, _CLOSE_ON_EXEC)
            if ancillary or flags & _CUT_OFF:
                self._keep(_descriptors(ancillary), is_cut_off=bool(flags & _CUT_OFF))
        else:
            data = self._sock.recv(_READ_BYTES)
        if not data:
            raise EOFError("the client has closed the connection")
        self._received = data if self._has_read_all else self._received[self._position :] + data
        self._position = 0

    def _keep(self, descriptors: list[int], *, is_cut_off: bool) -> None:
        if len(descriptors) == 1 and self._descriptor is None and not is_cut_off:
            (self._descriptor,) = descriptors
            return
        for each in descriptors:
            os.close(each)
        raise FrameError("expected at most one descriptor, got several")

    async def _more(self, seconds: float | None) -> None:
        """Waits until more bytes are received ahead."""
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
        self._loop.add_writer(self._number, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._number)

    def _listen(self) -> None:
        # The loop keeps listening between calls, which saves most of the system calls of a small one. It is told each
        # time all the same, which costs none: when uvloop sees that a connection was reset, it reports this once, along
        # with the bytes before, and stops listening. Then it wants to forget the socket first.
        try:
            self._loop.add_reader(self._number, self._has_bytes)
        except RuntimeError:
            self._loop.remove_reader(self._number)
            self._loop.add_reader(self._number, self._has_bytes)
        self._is_listening = True

    def ignore(self) -> None:
        """Stops listening to the socket until somebody reads again."""
        if self._is_listening:
            self._loop.remove_reader(self._number)
            self._is_listening = False

    def _has_bytes(self) -> None:
        reader = self._reader
        if reader is not None:
            if reader.done():
                return
            # Here rather than in the reader, because the loop would find the socket readable again until that runs.
            try:
                self._receive()
            except BlockingIOError:
                return
            except (EOFError, FrameError, OSError) as error:
                # Its traceback would refer to this frame and thus to the future: a cycle with the whole connection.
                reader.set_exception(error.with_traceback(None))
            else:
                reader.set_result(None)
        elif self._is_readable():
            # Nobody reads the bytes now, and they would wake the loop again and again.
            self.ignore()
            self._tell()

    def _tell(self) -> None:
        if self._watcher is not None:
            self._watcher()

    def _is_readable(self) -> bool:
        """Returns False if the bytes that the loop saw have been read already."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


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
