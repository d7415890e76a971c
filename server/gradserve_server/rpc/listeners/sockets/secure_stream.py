"""A stream of frames over a non-blocking socket with TLS."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence

from gradserve_protocol.tls import CertificateFiles, SecureSocket
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.listeners.sockets.stream import FrameStream
from gradserve_server.rpc.listeners.sockets.transfers import Discarding, Receiving, Transfers
from gradserve_server.security.identity import PeerCertificate

_HANDSHAKE = 22
"""The first byte that a client with TLS sends."""
_REASON_SECONDS = 1.0
"""Seconds that a client may take to read why the handshake failed."""
_UNREAD_BYTES = 1 << 16


def _read_decrypted(job: "SecureReceiving | SecureDiscarding") -> int:
    """Reads bytes that are decrypted already, which the system no longer reports; returns their number."""
    decrypted = 0 if job.is_done else job.sock.pending()
    return job._read(decrypted) if decrypted else 0


class SecureReceiving(Receiving):
    """Fills memory from a socket with TLS."""

    sock: SecureSocket

    def step(self) -> int:
        """Reads the bytes that have arrived."""
        return super().step() + _read_decrypted(self)


class SecureDiscarding(Discarding):
    """Reads and drops a payload from a socket with TLS."""

    sock: SecureSocket

    def step(self) -> int:
        """Reads the bytes that have arrived."""
        return super().step() + _read_decrypted(self)


class SecureStream(FrameStream):
    """Reads and writes encrypted frames."""

    _receiving = SecureReceiving
    _discarding = SecureDiscarding

    def __init__(
        self, sock: socket.socket, certificates: CertificateFiles, transfers: Transfers, idle_seconds: float
    ) -> None:
        """Takes over a connected, non-blocking socket; see `FrameStream`."""
        super().__init__(sock, transfers, idle_seconds)
        self._plain = sock
        self._certificates = certificates
        self._secured: SecureSocket | None = None
        self._is_shaking_hands = False

    async def open(self) -> None:
        """Performs the handshake; see `FrameStream`."""
        while not (first := self._first_byte()):
            await self._ready(self._loop.add_reader, self._loop.remove_reader)
        if first[0] != _HANDSHAKE:
            # The answer is not encrypted either. Closing a socket with unread bytes would discard it.
            self._plain.recv(_UNREAD_BYTES)
            raise InvalidArgumentError("this socket uses TLS: connect with tls=gradserve.TLS(ca=...)")
        self._is_shaking_hands = True
        context = self._certificates.current().context
        secured = context.wrap_socket(self._plain, server_side=True, do_handshake_on_connect=False)
        self._sock = self._secured = SecureSocket(secured)
        try:
            await self._shake_hands(self._secured)
        except ssl.SSLError:
            # The reason is on its way to the client, which may have sent more in the meantime.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_REASON_SECONDS):
                    await self._wait_for_end(self._secured)
            raise
        self._is_shaking_hands = False
        self.peer = PeerCertificate.of_socket(self._secured.peer_certificate())

    async def write(self, pieces: Sequence[bytes | memoryview], descriptor: int | None = None) -> None:
        if self._is_shaking_hands:
            raise ConnectionAbortedError("the handshake has failed")
        await super().write(pieces, descriptor)

    def end_with(self, frame: bytes) -> None:
        if self._secured is not None and not self._is_shaking_hands:
            super().end_with(frame)

    @property
    def _has_read_all(self) -> bool:
        return super()._has_read_all and not (self._secured is not None and self._secured.pending())

    async def _more(self, seconds: float | None) -> None:
        if self._secured is not None and self._secured.pending():
            return self._receive()
        return await super()._more(seconds)

    async def _shake_hands(self, secured: SecureSocket) -> None:
        while True:
            try:
                return secured.shake_hands()
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def _wait_for_end(self, secured: SecureSocket) -> None:
        """Closes the sending side, and waits until the client has closed its side."""
        secured.shutdown(socket.SHUT_WR)
        while True:
            try:
                if not secured.recv_encrypted(_UNREAD_BYTES):
                    return
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)

    def _first_byte(self) -> bytes:
        """Returns the first byte, or nothing if it has not arrived yet.

        Raises:
            EOFError: The client has left.
            OSError: The connection is gone.
        """
        try:
            first = self._plain.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return b""
        if not first:
            raise EOFError("the client has closed the connection")
        return first

    async def _ready(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        ready = asyncio.Event()
        add(self._number, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self._number)
