"""Addresses of servers."""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

from gradserve_protocol.argument import described
from gradserve_protocol.errors import InvalidArgumentError

DEFAULT_PORT = 50051

_MAX_PORT = 65535
_MAX_PATH_BYTES = 101
"""The longest path. The system allows 107 bytes; servers first make their socket under a name up to 6 bytes longer."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*).*", re.DOTALL)
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([\w-]{0,62})(\.[a-z0-9_][\w-]{0,62})*\.?", re.ASCII | re.IGNORECASE)
_IN_PROCESS = "in-process:"
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")


@dataclass(frozen=True)
class Address:
    """The address of a server: a host and a port, the path of a Unix socket, or a name in this process.

    Attributes:
        host: A name, or an IPv4 or IPv6 address; empty for a Unix socket.
        port: 1 to 65535; 0 for a free port to listen on, and for a Unix socket.
        path: The path of the Unix socket; empty for a host.
        name: The name of a server in this process, for tests; empty for all others.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    name: str = ""

    @classmethod
    def to_connect(cls, text: str) -> "Address":
        """Returns the address of a server to connect to.

        Args:
            text: "HOST:PORT", "HOST" for port 50051, "[IPV6]:PORT", "unix:PATH" or "unix:///PATH". White space around
                it is ignored.

        Raises:
            InvalidArgumentError: The text is none of these.
        """
        given = text.strip() if isinstance(text, str) else ""
        if given.startswith(_IN_PROCESS):
            return cls(name=given.removeprefix(_IN_PROCESS))
        address = _parse(text)
        if address.host and address.port == 0:
            _refuse(text, "port 0 is for a server to listen on; connect to the port that the server has picked")
        return address

    @classmethod
    def to_listen(cls, text: str) -> "Address":
        """Returns the address of a server that is to listen: like `to_connect`, but port 0 stands for a free port.

        Raises:
            InvalidArgumentError: The text is not such an address.
        """
        return _parse(text)

    @property
    def target(self) -> str:
        """The address in gRPC's notation, for a client to connect to."""
        if self.name:
            return str(self)
        if self.path:
            return f"unix:{quote(os.fsencode(self.path))}"
        return f"dns:///{quote(str(self), safe='[]:')}"

    def __str__(self) -> str:
        if self.name:
            return f"{_IN_PROCESS}{self.name}"
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def addresses_to_connect(given: str | Sequence[str]) -> tuple[Address, ...]:
    """Returns the addresses of the servers to connect to.

    Args:
        given: The address of a server, a list of addresses, or one text with commas between them.

    Raises:
        InvalidArgumentError: One of them is no address, or comes twice, or there are none.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        several = isinstance(given, str) and "," in given and not given.strip().lower().startswith("unix:")
        texts: Sequence[str] = given.split(",") if several else (given,)
    else:
        texts = given
    addresses = tuple(map(Address.to_connect, texts))
    if not addresses:
        raise InvalidArgumentError("expected at least one address, got none", field="address")
    for index, each in enumerate(addresses):
        if each in addresses[:index]:
            raise InvalidArgumentError(f"expected different addresses, got {str(each)!r} twice", field="address")
    return addresses


def _parse(given: object) -> Address:
    text = given.strip() if isinstance(given, str) else ""
    if not text:
        _refuse(given, "examples are 'localhost:50051' and 'unix:/run/gradserve.sock'")
    scheme, colon, rest = text.partition(":")
    if colon and scheme.lower() == "unix":
        return Address(path=_socket_path(given, rest))
    if colon and scheme.lower() == "unix-abstract":
        _refuse(given, "abstract sockets are not supported")
    if text.startswith(("/", "./", "../")):
        _refuse(given, f"write a Unix socket as 'unix:{text}'")
    if url := _URL.fullmatch(text):
        _refuse(given, _about_url(url[1], url[2]))
    host, port = _split(given, text)
    _check_host(given, host)
    return Address(host, _port_number(given, port))


def _socket_path(given: object, rest: str) -> str:
    if rest.startswith("//"):
        if not rest.startswith("///"):
            _refuse(given, f"write unix:///PATH, from the root, or 'unix:{rest[2:]}'")
        rest = rest[2:]
    if not rest or "\0" in rest or rest.endswith("/"):
        _refuse(given, "that is not the path of a Unix socket")
    if len(os.fsencode(rest)) > _MAX_PATH_BYTES:
        _refuse(given, f"the path of a Unix socket must have at most {_MAX_PATH_BYTES} bytes")
    return rest


def _about_url(scheme: str, place: str) -> str:
    advice = f"leave out '{scheme}://'" + (f" and write {place!r}" if place else "")
    return f"{advice}; tls=gradserve.TLS(...) encrypts connections" if scheme.lower() in ("https", "grpcs") else advice


def _split(given: object, text: str) -> tuple[str, str]:
    """Returns the host and the port, both as text."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not (bracket and _is_ipv6(host) and rest[:1] in ("", ":")):
            _refuse(given, "brackets enclose an IPv6 address, as in '[::1]:50051'")
        return host, rest[1:] if rest else str(DEFAULT_PORT)
    if text.count(":") > 1:
        _refuse(given, "there is more than one colon; put an IPv6 address in brackets, as in '[::1]:50051'")
    host, colon, port = text.partition(":")
    return host, port if colon else str(DEFAULT_PORT)


def _check_host(given: object, host: str) -> None:
    if host in ("", "*"):
        _refuse(given, "the host is missing; 'localhost' is this machine, and a server on '0.0.0.0' listens everywhere")
    if host.isdecimal():
        _refuse(given, f"the host is missing; for a port of this machine, write 'localhost:{host}'")
    is_valid = _is_ipv4(host) if _DIGITS_AND_DOTS.fullmatch(host) else _is_ipv6(host) or _NAME.fullmatch(host)
    if not is_valid:
        _refuse(given, f"{host!r} is neither the name of a host nor an IP address")


def _port_number(given: object, port: str) -> int:
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= _MAX_PORT):
        _refuse(given, f"a port is a number from 1 to {_MAX_PORT}")
    return int(port)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _refuse(given: object, why: str) -> NoReturn:
    raise InvalidArgumentError(
        f"expected an address, HOST:PORT or unix:PATH, got {described(given)}; {why}", field="address"
    )
