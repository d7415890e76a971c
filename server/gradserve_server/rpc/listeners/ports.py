"""Binds a gRPC server to addresses."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import grpc

from gradserve.address import Address
from gradserve_server.rpc.listeners.socket_file import bind_socket_file
from gradserve_server.runtime.files import OwnFile, reason_of

LOOPBACKS = ("127.0.0.1", "::1")
"""The addresses of localhost, whatever the system's tables say, because gRPC's clients try both."""

_ATTEMPTS = 10


class Ports:
    """Binds a gRPC server to addresses.

    If some addresses of a host are taken, gRPC serves on the others; and it logs the reason for a failure without
    returning it. So each address is bound separately, and after a failure the system is asked for the reason.
    """

    def __init__(
        self, server: grpc.aio.Server, loopbacks: Sequence[str], credentials: grpc.ServerCredentials | None = None
    ) -> None:
        """Takes the server, the addresses of localhost, and what encrypts connections over TCP."""
        self._server = server
        self._credentials = credentials
        self._loopbacks = loopbacks
        self._files: list[OwnFile] = []

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
        """Removes the files of Unix sockets that are still this server's, which frees their paths."""
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
            port = self._add(str(Address(host, port)), partial(_try_host, host, port), self._credentials)
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

    def _add(self, target: str, attempt: Callable[[], None], credentials: grpc.ServerCredentials | None = None) -> int:
        try:
            if credentials is not None:
                return self._server.add_secure_port(target, credentials)
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
