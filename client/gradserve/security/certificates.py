"""Certificates in files: read, checked, and read again when the files change."""

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gradserve.conversion.argument import Argument
from gradserve.errors import InvalidArgumentError
from gradserve.regular_file import read_regular
from gradserve.security.tls import TLS

_LOOK_SECONDS = 1.0
"""How long a change of the files may go unnoticed."""
_ATTEMPTS = 5
_MOST_BYTES = 16 << 20
"""The most bytes of a file: many times those of all authorities that a system trusts."""
_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_END_KEY = b"PRIVATE KEY-----"

_log = logging.getLogger("gradserve")

_State: TypeAlias = tuple[tuple[int, int, int, int], ...]


class CertificateError(ValueError):
    """A file cannot be used. The message names it and says why.

    Attributes:
        role: What it is for: "ca", "certificate" or "key".
    """

    def __init__(self, role: str, message: str) -> None:
        super().__init__(message)
        self.role = role


@dataclass(frozen=True)
class Certificates:
    """The contents of the files at one time.

    Attributes:
        ca: The authorities, in PEM format; None if there is no file.
        certificate: The certificate and those between it and its authority, in PEM format; None if there is no file.
        key: The private key of the certificate, in PEM format.
        context: The same for Python's sockets.
    """

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    context: ssl.SSLContext


class CertificateFiles:
    """The newest certificates in some files. Safe to use from several threads.

    Whoever replaces several files cannot do so at one instant. Files that do not fit together are read again until they
    do; until then, the certificates stay as they were.
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
        """Returns the certificates: another object after the files have changed."""
        if self._clock() >= self._next_look:
            self._look()
        return self._certificates

    def look_again(self) -> None:
        """Makes the next `current` look at the files, because what they had before does not work."""
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


def _state_of(files: TLS) -> _State:
    """Returns what changes when one of the files is replaced or written.

    Raises:
        CertificateError: One of them cannot be found.
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
    except OSError as error:  # one of them was removed since it was read
        raise CertificateError("certificate", f"{os.fspath(certificate)}: {error.strerror}") from None


def _authorities_of_the_system() -> bytes | None:
    path = ssl.get_default_verify_paths().cafile
    return None if path is None else _contents("ca", path)


def client_certificates(tls: object) -> CertificateFiles | None:
    """Returns the certificates of a client, which checks the server's name and certificate; None for None.

    Raises:
        InvalidArgumentError: It is not a `TLS`, or one of its files cannot be used.
    """
    if tls is None:
        return None
    if not isinstance(tls, TLS):
        raise Argument("tls").error("gradserve.TLS(ca=FILE)", tls)
    try:
        return CertificateFiles(tls, _client_context)
    except CertificateError as error:
        raise InvalidArgumentError(str(error), field=f"tls.{error.role}") from None


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
