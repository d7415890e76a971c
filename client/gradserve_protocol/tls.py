"""TLS for client and server: settings, certificates that are read again when their files change, and sockets."""

import array
import errno
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

_OPEN_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
"""No system has all of them."""


_LOOK_SECONDS = 1.0
"""The seconds for which a change of the files may go unnoticed."""
_ATTEMPTS = 5
_MOST_BYTES = 16 << 20
"""The size limit of a file: many times the size of all authorities that a system trusts."""
_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_END_KEY = b"PRIVATE KEY-----"
_RECORD_BYTES = 1 << 14
"""The size limit of a TLS record."""
_log = logging.getLogger("gradserve")
_State: TypeAlias = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class TLS:
    """Encrypted connections to a server, for `connect`. All files are in PEM format.

    The server's certificate must be valid for the host of the address, and signed by an authority of `ca`. When the
    files change, later connections use the new ones.

    Attributes:
        ca: The file with the certificates of the authorities that are trusted; None for those that the system trusts.
        certificate: The file with the client's own certificate, followed by those between it and its authority if there
            are any; None if the server asks for no certificate.
        key: The file with the private key of `certificate`, without a password.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str | os.PathLike)):
                raise InvalidArgumentError(
                    f"expected the path of a file for {name}, got {type(value).__qualname__}", field=f"tls.{name}"
                )
        if (self.certificate is None) != (self.key is None):
            missing, given = ("key", "certificate") if self.key is None else ("certificate", "key")
            raise InvalidArgumentError(f"expected {missing} as well, because {given} is given", field=f"tls.{missing}")


class CertificateError(ValueError):
    """An unusable file. The message names it and says why.

    Attributes:
        role: The purpose of the file: "ca", "certificate" or "key".
    """

    def __init__(self, role: str, message: str) -> None:
        super().__init__(message)
        self.role = role


@dataclass(frozen=True)
class Certificates:
    """The contents of the files at one time.

    Attributes:
        ca: The authorities, in PEM format; None if there is no file.
        certificate: The certificate, followed by intermediate ones, in PEM format; None if there is no file.
        key: The private key of the certificate, in PEM format.
        context: The same certificates for Python's sockets.
    """

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    context: ssl.SSLContext


class CertificateFiles:
    """The current certificates in a set of files. Safe to use from several threads.

    Several files cannot be replaced atomically. So files that do not match are read again until they do; until then,
    the previous certificates stay in use.
    """

    def __init__(
        self,
        files: TLS,
        make_context: Callable[[], ssl.SSLContext],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the files.

        Args:
            files: The files.
            make_context: Makes a context without certificates.
            clock: A monotonic clock in seconds.

        Raises:
            CertificateError: One of the files cannot be used.
        """
        self._files = files
        self._make_context = make_context
        self._clock = clock
        self._lock = threading.Lock()
        self._reported = ""
        self._state, self._certificates = self._read()
        self._next_look = clock() + _LOOK_SECONDS

    def current(self) -> Certificates:
        """Returns the certificates: a new object after the files have changed."""
        if self._clock() >= self._next_look:
            self._look()
        return self._certificates

    def look_again(self) -> None:
        """Makes the next `current` check the files, because their previous contents have failed."""
        self._next_look = 0.0

    def _look(self) -> None:
        with self._lock:
            self._next_look = self._clock() + _LOOK_SECONDS
            try:
                if _state_of(self._files) == self._state:
                    return
                self._state, self._certificates = self._read()
            except CertificateError as error:
                if str(error) != self._reported:
                    self._reported = str(error)
                    _log.warning("certificates have changed but cannot be used, the ones before stay: %s", error)
            else:
                self._reported = ""
                _log.info("certificates have changed: new connections use them")

    def _read(self) -> tuple[_State, Certificates]:
        for _ in range(_ATTEMPTS):
            before = _state_of(self._files)
            try:
                found = self._load()
            except CertificateError:
                if _state_of(self._files) == before:
                    raise
                continue
            if _state_of(self._files) == before:
                return before, found
        raise CertificateError("certificate", f"{self._files.certificate or self._files.ca}: it changes all the time")

    def _load(self) -> Certificates:
        context = self._make_context()
        ca = certificate = key = None
        if self._files.ca is not None:
            ca = _certificates_in("ca", self._files.ca)
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        elif context.verify_mode is ssl.CERT_REQUIRED:
            context.load_default_certs()
            ca = _authorities_of_the_system()
        if self._files.certificate is not None and self._files.key is not None:
            certificate = _certificates_in("certificate", self._files.certificate)
            key = _contents("key", self._files.key)
            _load_chain(context, self._files.certificate, self._files.key, key)
        return Certificates(ca, certificate, key, context)


def client_certificates(tls: object) -> CertificateFiles | None:
    """Returns the certificates of a client, which verifies the server's name and certificate; None for None.

    Raises:
        InvalidArgumentError: The argument is not a `TLS`, or one of its files cannot be used.
    """
    if tls is None:
        return None
    if not isinstance(tls, TLS):
        raise Argument("tls").error("gradserve.TLS(ca=FILE)", tls)
    try:
        return CertificateFiles(tls, client_context)
    except CertificateError as error:
        raise InvalidArgumentError(str(error), field=f"tls.{error.role}", code="GS_TLS_FILE") from None


class SecureSocket:
    """A non-blocking TCP socket with TLS that has the methods of `socket.socket` which connections use.

    It sends and receives as much as possible at once, and raises BlockingIOError if that is nothing. `pending` counts
    bytes that are decrypted but not yet returned; the system no longer reports these as readable. A peer that requests
    new keys, so that a receiver would have to wait for room to send, or a sender for bytes, is cut off.

    A connection ends as without TLS: by closing the sending side. Frames carry their length, so an end that an attacker
    forges is noticed like a broken connection.
    """

    def __init__(self, secured: ssl.SSLSocket) -> None:
        self.family = secured.family
        self.server_name = secured.server_hostname or ""
        self._secured = secured

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._secured.fileno()

    def shake_hands(self) -> None:
        """Continues the handshake until it needs more from the other side.

        Raises:
            ssl.SSLWantReadError, ssl.SSLWantWriteError: It has to wait until the socket is readable, or writable.
            OSError: It failed.
        """
        self._secured.do_handshake()

    def peer_certificate(self) -> dict[str, Any] | None:
        """Returns the verified certificate of the peer, in the form of `ssl.SSLSocket.getpeercert`, or None."""
        return self._secured.getpeercert() or None

    def pending(self) -> int:
        """Returns the number of decrypted bytes, which can be received without waiting."""
        return self._secured.pending()

    def recv_encrypted(self, num_bytes: int, flags: int = 0) -> bytes:
        """Receives what has arrived, without decrypting it."""
        return socket.socket.recv(self._secured, num_bytes, flags)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """Receives what has arrived; with MSG_PEEK, checks whether the system has any bytes."""
        if flags:
            return self.recv_encrypted(num_bytes, flags)
        try:
            return self._secured.recv(num_bytes)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def recv_into(self, memory: memoryview) -> int:
        """Fills memory with what there is; returns the number of bytes, 0 at the end of the connection."""
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
        """Fills buffers with what there is, in the form of `socket.recvmsg_into`."""
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

        After BlockingIOError the next call must begin with the same bytes: some are encrypted already.
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
        """Shuts down one or both directions of the underlying socket; safe while another thread uses it."""
        socket.socket.shutdown(self._secured, how)

    def close(self) -> None:
        """Closes the socket."""
        self._secured.close()

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        """Sets an option of the underlying socket."""
        self._secured.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int, num_bytes: int = 0) -> Any:
        """Returns an option of the underlying socket."""
        return self._secured.getsockopt(level, name, num_bytes) if num_bytes else self._secured.getsockopt(level, name)

    def getpeername(self) -> Any:
        """Returns the address of the peer."""
        return self._secured.getpeername()

    def setblocking(self, _blocking: bool) -> None:
        """Does nothing: the socket never blocks."""


def client_context() -> ssl.SSLContext:
    """Returns the context of a client's connections, without certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _state_of(files: TLS) -> _State:
    """Returns a fingerprint of the files, which changes when one of them is replaced or written.

    Raises:
        CertificateError: A file cannot be found.
    """
    found = []
    for role in ("ca", "certificate", "key"):
        path: str | os.PathLike[str] | None = getattr(files, role)
        if path is not None:
            try:
                status = os.stat(path)
            except OSError as error:
                raise CertificateError(role, f"{os.fspath(path)}: {error.strerror}") from None
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _contents(role: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise CertificateError(role, f"{os.fspath(path)}: {error.strerror}") from None


def _certificates_in(role: str, path: str | os.PathLike[str]) -> bytes:
    contents = _contents(role, path)
    if _BEGIN_CERTIFICATE not in contents:
        raise CertificateError(role, f"{os.fspath(path)}: expected a certificate in PEM format, found none")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=contents.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise CertificateError(role, f"{os.fspath(path)}: damaged certificate: {error.reason}") from None
    return contents


def _load_chain(
    context: ssl.SSLContext, certificate: str | os.PathLike[str], key: str | os.PathLike[str], key_pem: bytes
) -> None:
    if _END_KEY not in key_pem:
        raise CertificateError("key", f"{os.fspath(key)}: expected a private key in PEM format, found none")
    if b"ENCRYPTED" in key_pem:
        raise CertificateError("key", f"{os.fspath(key)}: expected a private key without a password")
    try:
        # The password keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(
                "key", f"{os.fspath(key)}: not the key of the certificate in {os.fspath(certificate)}"
            ) from None
        raise CertificateError("key", f"{os.fspath(key)}: damaged key: {error.reason or error}") from None
    except OSError as error:  # a file was removed after it was read
        raise CertificateError("certificate", f"{os.fspath(certificate)}: {error.strerror}") from None


def _authorities_of_the_system() -> bytes | None:
    path = ssl.get_default_verify_paths().cafile
    return None if path is None else _contents("ca", path)


def _records(buffers: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """Yields all bytes in pieces of one record each: joins small buffers, and slices large ones without copying."""
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


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the contents of a regular file, or of the one that a symbolic link leads to.

    Never waits: reads nothing from a named pipe or a terminal. A file that grows takes no more memory than allowed.

    Raises:
        OSError: It cannot be read, is not a regular file, or has more bytes; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in _OPEN_FLAGS))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, found another kind", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            contents = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(contents) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, found more", os.fspath(path))
    return contents
