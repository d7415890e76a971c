"""The way to a server: straight, or through an HTTP proxy, which gRPC takes from the environment."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from gradserve.address import Address

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The first of them that is set counts; an empty one says that there is no proxy."""

_EXCEPTION_VARIABLES = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class Proxy:
    """The proxy that connections to a server go through.

    Attributes:
        variable: Of the environment, where it was found.
        place: Its host and port, without the user and the password that may be there, too.
    """

    variable: str
    place: str

    def __str__(self) -> str:
        return f"{self.variable}=http://{self.place}"


@dataclass(frozen=True)
class Route:
    """The way to a server.

    Attributes:
        address: Where the server is.
        proxy: What connections go through, None for nothing.
    """

    address: Address
    proxy: Proxy | None

    @classmethod
    def to(cls, address: Address, environment: Mapping[str, str] = os.environ) -> Self:
        """Returns the way to an address that the environment asks for.

        gRPC's own rules, but for one: no proxy leads to the loopback addresses of this machine, so none is asked to.
        """
        return cls(address, _proxy_to(address, environment))

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """What a gRPC channel has to be told."""
        return () if self.proxy else (("grpc.enable_http_proxy", 0),)


def _proxy_to(address: Address, environment: Mapping[str, str]) -> Proxy | None:
    if not address.host or _is_loopback(address.host) or _is_excepted(address.host, environment):
        return None
    variable = next((name for name in PROXY_VARIABLES if name in environment), None)
    if variable is None:
        return None
    url = urlsplit(environment[variable])
    place = url.netloc.rpartition("@")[2]
    return Proxy(variable, place) if url.scheme == "http" and place else None


def _is_loopback(host: str) -> bool:
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address is not None and (address.is_loopback or address.is_unspecified)


def _is_excepted(host: str, environment: Mapping[str, str]) -> bool:
    variable = next((name for name in _EXCEPTION_VARIABLES if name in environment), None)
    entries = environment[variable].split(",") if variable else []
    return any(_matches(host, entry.strip()) for entry in entries if entry)


def _matches(host: str, entry: str) -> bool:
    """Tells whether a host ends as an entry does, or is in the network it names."""
    if host.lower().endswith(entry.lower()):
        return True
    address = _ip_address(host)
    try:
        return address is not None and "/" in entry and address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
