"""Listens on TCP and Unix sockets, and serves their connections."""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from functools import partial
from pathlib import Path

from gradserve.address import Address
from gradserve.lasting import lasting_task
from gradserve.security.certificates import CertificateFiles
from gradserve_server.errors import ResourceExhaustedError, UnavailableError
from gradserve_server.rpc.listeners.socket_file import bind_socket_file
from gradserve_server.rpc.listeners.sockets.connection import Connection
from gradserve_server.rpc.listeners.sockets.context import SocketContext
from gradserve_server.rpc.listeners.sockets.secure_stream import SecureStream
from gradserve_server.rpc.listeners.sockets.stream import FrameStream
from gradserve_server.rpc.listeners.sockets.transfers import Transfers
from gradserve_server.runtime.files import OwnFile, reason_of

_log = logging.getLogger(__name__)

_BACKLOG = 512
_MAX_UNKNOWN = 256
"""The most connections without a ticket; the oldest of them makes way for another."""
_TRANSFER_THREADS = 2
_PAUSE_SECONDS = 0.1
"""The pause after the system had no descriptor left for a connection."""
_QUIET_SECONDS = 60.0


class SocketListener:
    """Serves calls in frames. Made and used on one event loop; serves once."""

    def __init__(
        self,
        context: SocketContext,
        idle_seconds: float,
        certificates: CertificateFiles | None = None,
        *,
        max_connections: int = 10_000,
    ) -> None:
        """Makes a listener that is not bound yet.

        Args:
            context: What connections share.
            idle_seconds: How long a payload may make no progress.
            certificates: The certificates of connections over TCP; None if they are not encrypted.
            max_connections: The most connections. Clients for which there is no room make their calls over gRPC.
        """
        self._max_connections = max_connections
        self._context = context
        self._certificates = certificates
        self._idle_seconds = idle_seconds
        self._transfers: Transfers | None = None
        self._sockets: list[socket.socket] = []
        self._files: list[OwnFile] = []
        self._acceptors: list[asyncio.Task[None]] = []
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._last_report = float("-inf")

    def bind_tcp(self, host: str, port: int) -> list[Address]:
        """Listens on all addresses of a host, on one port; returns them with the port picked for 0.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        try:
            bound = _bound(host, port)
        except OSError as error:
            raise OSError(f"cannot listen on {Address(host, port)}: {reason_of(error)}") from None
        for sock in bound:
            self._listen(sock)
        return [Address(host, bound[0].getsockname()[1])]

    def bind_unix(self, path: Path) -> Path:
        """Listens on a Unix socket; returns its absolute path.

        Raises:
            OSError: It cannot be bound; the message says why.
        """

        def bind(beside: Path) -> None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.bind(str(beside))
            except OSError:
                sock.close()
                raise
            self._listen(sock)

        try:
            file = bind_socket_file(path.absolute(), bind)
        except OSError as error:
            raise OSError(f"cannot listen on unix:{path}: {reason_of(error)}") from None
        self._files.append(file)
        return file.path

    def serve(self) -> None:
        """Starts taking connections, and returns."""
        self._transfers = Transfers(_TRANSFER_THREADS, self._idle_seconds)
        self._acceptors = [
            lasting_task("taking connections", partial(self._accept, sock), _log) for sock in self._sockets
        ]

    async def drain(self, grace: float) -> None:
        """Stops: closes the sockets, lets calls under way go on for `grace` seconds, then ends them."""
        for task in self._acceptors:
            task.cancel()
        await asyncio.gather(*self._acceptors, return_exceptions=True)
        for sock in self._sockets:
            if self._transfers is not None:
                self._take_waiting(sock)
            sock.close()
        for file in self._files:
            file.remove()
        for task, connection in self._connections.items():
            if connection.is_idle:
                task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._transfers is not None:
            self._transfers.close()

    def _listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sockets.append(sock)

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()  # not by the loop, which loses a connection when this is cancelled
            except BlockingIOError:
                await _readable(listening)
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    _log.debug("a connection broke before it was accepted: %s", error)
                    continue
                self._report(error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._begin(sock)
            await asyncio.sleep(0)  # others want their turn while many connect

    def _report(self, error: OSError) -> None:
        """Logs that the system has no room for a connection, but only once in a while: clients decide how long."""
        now = time.monotonic()
        if now - self._last_report >= _QUIET_SECONDS:
            self._last_report = now
            _log.warning("cannot accept a connection: %s", reason_of(error))

    def _take_waiting(self, listening: socket.socket) -> None:
        """Takes the connections that have not been accepted yet, so that they do not end without a word."""
        with contextlib.suppress(OSError):
            while True:
                self._begin(listening.accept()[0])

    def _begin(self, sock: socket.socket) -> None:
        assert self._transfers is not None
        is_unix = sock.family == socket.AF_UNIX
        sock.setblocking(False)
        if not is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_unix or self._certificates is None:
            stream = FrameStream(sock, self._transfers, self._idle_seconds)
        else:
            stream = SecureStream(sock, self._certificates, self._transfers, self._idle_seconds)
        connection = Connection(stream, self._context, has_regions=is_unix)
        if len(self._connections) >= self._max_connections:
            connection.dismiss(ResourceExhaustedError(f"too many connections: {self._max_connections} are allowed"))
            connection.close()
            return
        task = asyncio.create_task(connection.serve())
        self._connections[task] = connection
        task.add_done_callback(self._ended)
        self._make_room()

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        # Here, because a task that is cancelled at once never runs.
        try:
            self._context.admission.check()
        except UnavailableError as reason:
            connection.dismiss(reason)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection failed", exc_info=error)

    def _make_room(self) -> None:
        unknown = [task for task, connection in self._connections.items() if not connection.is_open]
        for task in unknown[: max(len(unknown) - _MAX_UNKNOWN, 0)]:
            task.cancel()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(sock, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(sock)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Returns sockets bound to all addresses of a host, at least one, on the same port.

    Raises:
        OSError: One of them cannot be bound.
    """
    # As for gRPC, 0.0.0.0 means every address.
    hosts = ("0.0.0.0", "::") if host == "0.0.0.0" else (host,)
    found = [each for name in hosts for each in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    missing: OSError | None = None
    bound: list[socket.socket] = []
    with contextlib.ExitStack() as on_failure:
        for family, kind, protocol, _, (numeric, _, *scope) in dict.fromkeys(found):
            try:
                sock = on_failure.enter_context(_bound_to(family, kind, protocol, (numeric, port, *scope)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error  # localhost is often IPv4 only
                continue
            port = sock.getsockname()[1]
            bound.append(sock)
        if missing is not None and not bound:
            raise missing
        on_failure.pop_all()
    return bound


def _bound_to(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
