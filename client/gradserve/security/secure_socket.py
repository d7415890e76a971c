"""A socket with TLS that is used like one without."""

import array
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

_RECORD_BYTES = 1 << 14
"""The most bytes that TLS encrypts at once."""


class SecureSocket:
    """A non-blocking TCP socket with TLS, with those methods of `socket.socket` that connections use.

    It sends and receives as much as it can at once. It raises BlockingIOError if that is nothing. Bytes that it has
    decrypted but not returned are in `pending`; the system, which has given them away, does not report them any more.
    A peer that makes a receiver wait for room to send, or a sender for bytes, by asking for new keys, is cut off.

    A connection ends as it does without TLS: by closing the sending side. Frames say how long they are, so an end that
    somebody else makes goes no more unnoticed than a broken connection.
    """

    def __init__(self, secured: ssl.SSLSocket) -> None:
        self.family = secured.family
        self.server_name = secured.server_hostname or ""
        self._secured = secured

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._secured.fileno()

    def shake_hands(self) -> None:
        """Goes on with the handshake as far as possible.

        Raises:
            ssl.SSLWantReadError, ssl.SSLWantWriteError: It has to wait until the socket can be read, or written.
            OSError: It failed.
        """
        self._secured.do_handshake()

    def peer_certificate(self) -> dict[str, Any] | None:
        """Returns the checked certificate of the other side as `ssl.SSLSocket.getpeercert` does, or None."""
        return self._secured.getpeercert() or None

    def pending(self) -> int:
        """Returns the number of bytes that can be received without waiting, whatever the system says."""
        return self._secured.pending()

    def recv_encrypted(self, num_bytes: int, flags: int = 0) -> bytes:
        """Receives what the system has, without decrypting it."""
        return socket.socket.recv(self._secured, num_bytes, flags)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """Receives what there is; with MSG_PEEK, looks if the system has anything."""
        if flags:
            return self.recv_encrypted(num_bytes, flags)
        try:
            return self._secured.recv(num_bytes)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def recv_into(self, memory: memoryview) -> int:
        """Fills memory as far as possible; returns the number of bytes, 0 at the end."""
        return self._fill(memory)

    def _fill(self, memory: memoryview) -> int:
        count = 0
        while count < len(memory):
            try:
                received = self._secured.recv_into(memory[count:])
            except ssl.SSLWantReadError:
                if not count:
                    raise BlockingIOError from None
                break
            if not received:
                break
            count += received
        return count

    def recvmsg_into(
        self, buffers: Iterable[bytes | memoryview], _space: int = 0, _flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        """Fills buffers as far as possible, in the form of `socket.recvmsg_into`."""
        total = 0
        for buffer in buffers:
            try:
                count = self._fill(memoryview(buffer))
            except BlockingIOError:
                if not total:
                    raise
                break
            total += count
            if count < len(buffer):
                break
        return total, [], 0, None

    def send(self, data: bytes | memoryview) -> int:
        """Sends as much as possible; returns the number of bytes."""
        return self.sendmsg((data,))

    def sendmsg(
        self,
        buffers: Sequence[bytes | memoryview],
        _ancillary: Sequence[tuple[int, int, "array.array[int]"]] = (),
        _flags: int = 0,
    ) -> int:
        """Sends as much of the buffers as possible; returns the number of bytes.

        After BlockingIOError the next call has to begin with the same bytes: some of them are encrypted already.
        """
        total = 0
        for piece in _records(buffers):
            try:
                total += (sent := self._secured.send(piece))
            except ssl.SSLWantWriteError:
                if not total:
                    raise BlockingIOError from None
                break
            if sent < len(piece):
                break
        return total

    def shutdown(self, how: int) -> None:
        """Closes the sending side or both, of the socket below; safe while another thread uses it."""
        socket.socket.shutdown(self._secured, how)

    def close(self) -> None:
        """Closes it."""
        self._secured.close()

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        """Sets an option of the socket below."""
        self._secured.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int, num_bytes: int = 0) -> Any:
        """Returns an option of the socket below."""
        return self._secured.getsockopt(level, name, num_bytes) if num_bytes else self._secured.getsockopt(level, name)

    def getpeername(self) -> Any:
        """Returns the address of the other side."""
        return self._secured.getpeername()

    def setblocking(self, _blocking: bool) -> None:
        """Does nothing: it never blocks."""


def _records(buffers: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """Yields all bytes in pieces of one record each: small buffers together, large ones without copying them."""
    small = bytearray()
    for buffer in buffers:
        rest = memoryview(buffer)
        if small:
            taken = rest[: _RECORD_BYTES - len(small)]
            small += taken
            rest = rest[len(taken) :]
            if len(small) == _RECORD_BYTES:
                yield bytes(small)
                small.clear()
        while len(rest) >= _RECORD_BYTES:
            yield rest[:_RECORD_BYTES]
            rest = rest[_RECORD_BYTES:]
        small += rest
    if small:
        yield bytes(small)
