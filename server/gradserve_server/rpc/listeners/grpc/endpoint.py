"""A gRPC server bound to addresses, and its replacement when a client brings it down."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from gradserve.transport.route import Route
from gradserve_protocol.address import Address
from gradserve_protocol.lasting import lasting_task
from gradserve_protocol.tls import CertificateFiles, Certificates
from gradserve_server.runtime.files import OwnedFile, bind_socket_file, reason_of

_log = logging.getLogger(__name__)

LOOPBACKS = ("127.0.0.1", "::1")
"""The addresses of localhost, whatever the system's tables say, because gRPC's clients try both."""
_ATTEMPTS = 10

_CHECK_SECONDS = 0.2
_BIND_PAUSE_SECONDS = 0.02
_QUIET_SECONDS = 60.0
_FOR_EVER_SECONDS = 1e9
_PROBE_SECONDS = 5.0
_INSTEAD_OF_PROBE_SECONDS = 0.1
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class Endpoint:
    """A gRPC server and its ports. Made and used on one event loop; serves once."""

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        loopbacks: Sequence[str],
        certificates: CertificateFiles | None = None,
    ) -> None:
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._ports = Ports(self._server, loopbacks, certificates)
        self._has_started = False

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports picked for port 0, and with absolute paths.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        return [self._ports.bind(address) for address in addresses]

    async def start(self) -> None:
        """Starts serving. A cancellation waits until it does: gRPC's server breaks if its start is cut short."""
        self._has_started = True
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def failure(self) -> Exception | None:
        """Waits until the server has ended; returns the reason, or None if it was stopped."""
        while True:
            try:
                if not await self._server.wait_for_termination(_CHECK_SECONDS):
                    return None
            except Exception as error:
                return error

    def remove_files(self) -> None:
        """Removes the files of its Unix sockets."""
        self._ports.remove_files()

    async def stop(self, grace: float) -> None:
        """Closes the ports, lets calls in flight go on for `grace` seconds, then ends them with UNAVAILABLE.

        May be called again before it is done, with another `grace`.
        """
        if not self._has_started:
            await self.start()  # gRPC releases bound ports only after a start
        try:
            await self._server.stop(grace)
        except UnicodeDecodeError:
            # The last call brought gRPC's server down; now it stops.
            await self._server.stop(grace)


class LastingEndpoint:
    """A gRPC server that serves until it is stopped, whatever clients send.

    A call to a method whose name is not UTF-8 ends the loop in which gRPC's asyncio server takes calls. Calls in flight
    then go on over their connections, and a moment later another gRPC server takes new calls on the same addresses.
    Clients find their connection closed, and open another one.
    """

    def __init__(self, make: Callable[[], Endpoint], *, is_encrypted: bool = False) -> None:
        self._make = make
        self._is_encrypted = is_encrypted
        self._current = make()
        self._addresses: list[Address] = []
        self._supervision: asyncio.Task[None] | None = None
        self._abandoned: dict[Endpoint, asyncio.Task[None]] = {}
        self._last_report = float("-inf")
        self._has_failed = False
        """True from the end of the current endpoint until another one serves."""

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; see `Endpoint.bind`."""
        self._addresses = self._current.bind(addresses)
        return self._addresses

    async def start(self) -> None:
        """Starts serving."""
        await self._current.start()
        self._supervision = lasting_task("the replacement of gRPC's server", self._supervise, _log)

    async def probe(self) -> None:
        """Makes a health check of itself, as a client would, and waits for the answer, whatever it is.

        A server with TLS has no client certificate to show. Without a Unix socket, it waits for a moment instead.
        """
        address = next((each for each in self._addresses if each.path or not self._is_encrypted), None)
        if address is None:
            return await asyncio.sleep(_INSTEAD_OF_PROBE_SECONDS)
        options = Route.to(address, {}).options
        async with grpc.aio.insecure_channel(address.target, options=options) as channel:
            check: Any = channel.unary_unary(_HEALTH_CHECK)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await check(b"", timeout=_PROBE_SECONDS)
        return None

    async def stop(self, grace: float, told: Callable[[], None]) -> None:
        """Closes the ports, lets calls in flight go on for `grace` seconds, then ends them with UNAVAILABLE.

        Calls `told` once the ports are closed and clients have been told so.
        """
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._current.remove_files()
        stopping = [asyncio.create_task(each.stop(grace)) for each in {self._current, *self._abandoned}]
        # The tasks close the ports and tell clients before they first wait.
        await asyncio.sleep(0)
        told()
        await asyncio.gather(*stopping, *self._abandoned.values())

    async def _supervise(self) -> None:
        while True:
            if not self._has_failed:
                failure = await self._current.failure()
                if failure is None:
                    return
                self._has_failed = True
                self._report(failure)
                self._abandon(self._current)
            self._current = await self._replacement()
            await self._current.start()
            self._has_failed = False

    def _report(self, failure: Exception) -> None:
        """Logs a failure, at most once a minute, because a client can cause it again and again."""
        now = time.monotonic()
        if now - self._last_report < _QUIET_SECONDS:
            return
        self._last_report = now
        traceback = None if isinstance(failure, UnicodeDecodeError) else failure
        _log.warning("gRPC's server ended: %s; another one has replaced it", failure, exc_info=traceback)

    def _abandon(self, endpoint: Endpoint) -> None:
        endpoint.remove_files()
        task = asyncio.create_task(endpoint.stop(_FOR_EVER_SECONDS))
        self._abandoned[endpoint] = task
        task.add_done_callback(lambda _: self._abandoned.pop(endpoint))

    async def _replacement(self) -> Endpoint:
        """Returns an endpoint bound to the same addresses as soon as they are free."""
        while True:
            endpoint = self._make()
            try:
                endpoint.bind(self._addresses)
            except OSError as error:
                _log.debug("%s; trying again", error)
                await endpoint.stop(0)
                endpoint.remove_files()
                await asyncio.sleep(_BIND_PAUSE_SECONDS)
            else:
                return endpoint


class Ports:
    """Binds a gRPC server to addresses.

    If some addresses of a host are taken, gRPC serves on the others, and it logs the reason for a failure instead of
    returning it. So each address is bound separately, and after a failure the system is asked for the reason.
    """

    def __init__(
        self, server: grpc.aio.Server, loopbacks: Sequence[str], certificates: CertificateFiles | None = None
    ) -> None:
        self._server = server
        self._certificates = certificates
        self._loopbacks = loopbacks
        self._files: list[OwnedFile] = []

    def bind(self, address: Address) -> Address:
        """Binds an address; returns it with the port picked for port 0, or with the absolute path.

        Raises:
            OSError: It cannot be bound.
        """
        try:
            return self._bind_path(Path(address.path)) if address.path else self._bind_host(address)
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {reason_of(error)}") from None

    def remove_files(self) -> None:
        """Removes the files of Unix sockets that still belong to this server, which frees their paths."""
        while self._files:
            self._files.pop().remove()

    def _bind_path(self, path: Path) -> Address:
        file = bind_socket_file(path.absolute(), self._add_path)
        self._files.append(file)
        return Address(path=str(file.path))

    def _bind_host(self, address: Address) -> Address:
        hosts = self._resolve(address.host)
        port = address.port
        if len(hosts) > 1:
            hosts = _present(hosts)
            port = port or _free_port(hosts)
        for host in hosts:
            port = self._add(str(Address(host, port)), partial(_try_host, host, port), self._certificates)
        return replace(address, port=port)

    def _resolve(self, host: str) -> Sequence[str]:
        """Returns the IP addresses of a host."""
        if host == "localhost":
            return self._loopbacks
        if ":" in host:
            return (host,)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(place[0]) for *_, place in found))

    def _add_path(self, path: Path) -> None:
        self._add(f"unix:{quote(os.fsencode(path))}", partial(_try_path, path))

    def _add(self, target: str, attempt: Callable[[], None], certificates: CertificateFiles | None = None) -> int:
        try:
            if certificates is not None:
                return self._server.add_secure_port(target, _PortCredentials(certificates).made())
            return self._server.add_insecure_port(target)
        except RuntimeError:
            attempt()
            raise OSError("gRPC gave no reason; --log-level debug shows its log") from None


def _present(hosts: Sequence[str]) -> Sequence[str]:
    """Returns the addresses that the machine has: localhost is often IPv4 only."""
    present, failure = [], OSError("it has no address")
    for host in hosts:
        try:
            _listen(host, 0).close()
        except OSError as error:
            failure = error
        else:
            present.append(host)
    if not present:
        raise failure
    return present


def _free_port(hosts: Sequence[str]) -> int:
    """Returns a port that is free on all the addresses."""
    for _ in range(_ATTEMPTS):
        port = 0
        with ExitStack() as listeners, suppress(OSError):
            for host in hosts:
                port = listeners.enter_context(_listen(host, port)).getsockname()[1]
            return port
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _listen(host: str, port: int) -> socket.socket:
    (family, kind, _, _, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with ExitStack() as on_failure:
        listener = on_failure.enter_context(socket.socket(family, kind))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        on_failure.pop_all()
    return listener


def _try_host(host: str, port: int) -> None:
    _listen(host, port).close()


def _try_path(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.unlink()


class _PortCredentials:
    """The certificates of one port: each new connection gets the newest ones.

    gRPC asks before each connection, in its own threads, and must be told that nothing has changed unless something
    has: it takes a configuration for its own, so the same one again is freed twice; and it replaces the old one even
    while other connections begin with it (grpc#36693), which ends the process.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._given = files.current()

    def made(self) -> grpc.ServerCredentials:
        asks_clients = self._given.ca is not None
        changed: Any = self._changed  # grpcio takes None, which types-grpcio does not know
        return grpc.dynamic_ssl_server_credentials(_configuration(self._given), changed, asks_clients)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        certificates = self._files.current()
        with self._lock:
            if certificates is self._given:
                return None
            self._given = certificates
        return _configuration(certificates)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    assert certificates.key is not None
    assert certificates.certificate is not None
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], certificates.ca)
