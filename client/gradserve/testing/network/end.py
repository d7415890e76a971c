"""One end of a connection through a proxy."""

import asyncio
import os
import socket
from dataclasses import dataclass

_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8


@dataclass(frozen=True)
class Piece:
    """What one system call received.

    Attributes:
        data: The bytes.
        descriptors: The descriptors that came with them, which are closed once they are sent.
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
        """Returns what comes next, nothing at the end."""
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
