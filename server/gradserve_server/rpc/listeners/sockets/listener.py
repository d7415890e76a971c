"""The listener of TCP and Unix sockets: chooses and binds their addresses, and serves their connections."""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from gradserve_protocol.address import Address
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.lasting import lasting_task
from gradserve_protocol.tls import CertificateFiles
from gradserve_server.config import ListenConfig
from gradserve_server.errors import ResourceExhaustedError, UnavailableError
from gradserve_server.rpc.listeners.sockets.connection import Connection
from gradserve_server.rpc.listeners.sockets.context import SocketContext
from gradserve_server.rpc.listeners.sockets.secure_stream import SecureStream
from gradserve_server.rpc.listeners.sockets.stream import FrameStream
from gradserve_server.rpc.listeners.sockets.transfers import Transfers
from gradserve_server.rpc.sockets.service import SocketAddresses
from gradserve_server.runtime.files import OwnedFile, bind_socket_file, reason_of

_log = logging.getLogger(__name__)

_BACKLOG = 512
_MAX_UNKNOWN = 256
"""The most connections that have not shown a ticket; beyond it, the oldest of them ends."""
_TRANSFER_THREADS = 2
_PAUSE_SECONDS = 0.1
"""The pause after the system had no descriptor for a connection."""
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
        """Makes an unbound listener. Clients beyond `max_connections` make their calls over gRPC."""
        self._max_connections = max_connections
        self.context = context
        self._certificates = certificates
        self._idle_seconds = idle_seconds
        self._transfers: Transfers | None = None
        self._sockets: list[socket.socket] = []
        self._files: list[OwnedFile] = []
        self._acceptors: list[asyncio.Task[None]] = []
        self.connections: dict[asyncio.Task[None], Connection] = {}
        self._last_report = float("-inf")

    def bind_tcp(self, host: str, port: int) -> list[Address]:
        """Listens on all addresses of a host, on one port; returns the address with the port picked for 0.

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
        """Stops: closes the sockets, lets calls in flight go on for `grace` seconds, then ends them."""
        for task in self._acceptors:
            task.cancel()
        await asyncio.gather(*self._acceptors, return_exceptions=True)
        for sock in self._sockets:
            if self._transfers is not None:
                self._take_waiting(sock)
            sock.close()
        for file in self._files:
            file.remove()
        for task, connection in self.connections.items():
            if connection.is_idle:
                task.cancel()
        if self.connections:
            await asyncio.wait(self.connections, timeout=grace)
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        if self._transfers is not None:
            self._transfers.close()

    def _listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sockets.append(sock)

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()  # the loop would lose a connection if this were cancelled
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
            await asyncio.sleep(0)  # lets others run while many clients connect

    def _report(self, error: OSError) -> None:
        """Logs that the system has no room for a connection, at most once a minute: clients decide how often."""
        now = time.monotonic()
        if now - self._last_report >= _QUIET_SECONDS:
            self._last_report = now
            _log.warning("cannot accept a connection: %s", reason_of(error))

    def _take_waiting(self, listening: socket.socket) -> None:
        """Accepts the connections that still wait, so that their clients learn why they end."""
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
        connection = Connection(stream, self.context, has_regions=is_unix)
        if len(self.connections) >= self._max_connections:
            connection.dismiss(
                ResourceExhaustedError(f"too many connections: {self._max_connections} are allowed", code="GS_TOO_MANY")
            )
            connection.close()
            return
        task = asyncio.create_task(connection.serve())
        self.connections[task] = connection
        task.add_done_callback(self._ended)
        self._make_room()

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self.connections.pop(task)
        # Here, because a task that is cancelled right away never runs.
        try:
            self.context.admission.check()
        except UnavailableError as reason:
            connection.dismiss(reason)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection failed", exc_info=error)

    def _make_room(self) -> None:
        unknown = [task for task, connection in self.connections.items() if not connection.is_open]
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
    """Returns sockets bound to the same port on all addresses of a host, at least one.

    Raises:
        OSError: One of them cannot be bound.
    """
    # As in gRPC, 0.0.0.0 means every address.
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


def bind_sockets(
    listener: SocketListener, config: ListenConfig, grpc_addresses: Sequence[Address], found: SocketAddresses
) -> None:
    """Binds the sockets of a server, and notes their addresses.

    Args:
        listener: The listener.
        config: The configured addresses.
        grpc_addresses: The addresses on which the server listens for gRPC.
        found: Receives the addresses.

    Raises:
        OSError: A configured address or path cannot be bound. Those that `auto` chooses are skipped instead.
    """
    found.tcp = _bind_tcp(listener, config.bulk_listen, grpc_addresses)
    if config.shared_memory_socket not in ("auto", "off"):
        found.unix_path = str(listener.bind_unix(Path(config.shared_memory_socket)))
    elif config.shared_memory_socket == "auto" and hasattr(os, "memfd_create"):
        found.unix_path = _bind_unix(listener, grpc_addresses)


def _bind_tcp(listener: SocketListener, wanted: str, grpc_addresses: Sequence[Address]) -> list[Address]:
    if wanted == "off":
        return []
    if wanted != "auto":
        address = Address.to_listen(wanted)
        bound = listener.bind_tcp(address.host, address.port)
        return [_public(each, grpc_addresses) for each in bound]
    ports: list[Address] = []
    for host in dict.fromkeys(each.host for each in grpc_addresses if each.host):
        try:
            ports += [_public(each, grpc_addresses) for each in listener.bind_tcp(host, 0)]
        except OSError as error:
            _log.warning("no bulk socket: %s", error)
    return ports


def _public(address: Address, grpc_addresses: Sequence[Address]) -> Address:
    """Omits the host if clients know a better one: the host at which they reach the server over gRPC."""
    same = any(each.host == address.host for each in grpc_addresses)
    return Address("", address.port) if same or address.host in ("0.0.0.0", "::") else address


def _bind_unix(listener: SocketListener, grpc_addresses: Sequence[Address]) -> str:
    problems: list[str] = []
    for path in _candidates(grpc_addresses, problems):
        try:
            Address.to_listen(f"unix:{path}")
            return str(listener.bind_unix(Path(path)))
        except (InvalidArgumentError, OSError) as error:  # the former: it is too long
            problems.append(str(error))
    _log.warning(
        "no shared memory for clients of this machine, which take slower ways: %s; --shared-memory-socket PATH names a "
        "place for its socket, and off does without it",
        "; ".join(problems),
    )
    return ""


def _candidates(grpc_addresses: Sequence[Address], problems: list[str]) -> Iterator[str]:
    for each in grpc_addresses:
        if each.path:
            yield f"{each.path}.shm"
    try:
        folder = _runtime_folder()
    except OSError as error:
        problems.append(str(error))
    else:
        yield str(folder / f"{secrets.token_hex(8)}.sock")


def _runtime_folder() -> Path:
    """Returns a folder that only this user can enter, without the sockets of servers that have ended.

    Clients learn its name over gRPC. So if somebody else has taken the usual name, an unpredictable one serves as well,
    and later servers of this user find it again.

    Raises:
        OSError: The folder cannot be made.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    usual = base / f"gradserve-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    own = [each for each in (usual, *sorted(base.glob(f"{usual.name}-*"))) if _is_private(each)]
    for each in own:
        _remove_dead(each)
    return own[0] if own else Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=base))


def _is_private(folder: Path) -> bool:
    """Returns True for a folder of this user that nobody else can enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _remove_dead(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
