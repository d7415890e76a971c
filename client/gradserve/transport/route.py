"""The route to a server: direct, or through an HTTP proxy, which gRPC takes from the environment."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from gradserve_protocol.address import Address

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that name a proxy. The first one set counts; an empty one means no proxy."""

_EXCEPTION_VARIABLES = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class Proxy:
    """The proxy that connections to a server go through.

    Attributes:
        variable: The environment variable that named it.
        place: Its host and port, without a user and password.
    """

    variable: str
    place: str

    def __str__(self) -> str:
        return f"{self.variable}=http://{self.place}"


@dataclass(frozen=True)
class Route:
    """The route to a server.

    Attributes:
        address: The server's address.
        proxy: The proxy of its connections, or None.
    """

    address: Address
    proxy: Proxy | None

    @classmethod
    def to(cls, address: Address, environment: Mapping[str, str] = os.environ) -> Self:
        """Returns the route to an address in this environment.

        Follows gRPC's rules, with one exception: no proxy is used for loopback addresses, which a proxy cannot reach.
        """
        return cls(address, _proxy_to(address, environment))

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """The channel options that it needs."""
        return () if self.proxy else (("grpc.enable_http_proxy", 0),)


def _proxy_to(address: Address, environment: Mapping[str, str]) -> Proxy | None:
    if not address.host or is_loopback(address.host) or _is_excepted(address.host, environment):
        return None
    variable = next((name for name in PROXY_VARIABLES if name in environment), None)
    if variable is None:
        return None
    url = urlsplit(environment[variable])
    place = url.netloc.rpartition("@")[2]
    return Proxy(variable, place) if url.scheme == "http" and place else None


def is_loopback(host: str) -> bool:
    """Returns True if a host means this machine."""
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
    """Returns True if a host ends like an entry, or is in the network that the entry names."""
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
