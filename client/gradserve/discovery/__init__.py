"""Finds the servers that a client connects to: listed by their addresses, or looked up in DNS or on Ray."""

import re
from collections.abc import Callable, Mapping, Sequence

from gradserve.discovery.dns import servers_of_service
from gradserve.discovery.ray import servers_on_ray
from gradserve_protocol.address import Address, addresses_to_connect
from gradserve_protocol.errors import InvalidArgumentError

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://(.*?)\s*", re.DOTALL)
_LOOKUPS: Mapping[str, Callable[[str, float], Sequence[str]]] = {
    "dns+srv": lambda service, _timeout: servers_of_service(service),  # It has its own, shorter time limit.
    "gradserve+ray": servers_on_ray,
}
"""Lookups by scheme. Each takes the text after SCHEME://, and the seconds that it may wait for servers; it returns
their addresses in order."""


def servers_to_connect(given: str | Sequence[str], timeout: float) -> tuple[Address, ...]:
    """Returns the addresses of the servers to connect to. Blocks during a lookup.

    Args:
        given: What `addresses_to_connect` takes, or one text that begins with one of the schemes: "dns+srv://SERVICE",
            "gradserve+ray://CLUSTER".
        timeout: The seconds to wait for servers that are known but not up yet.

    Raises:
        InvalidArgumentError: It is none of these, or the lookup needs a library that is not installed.
        NotFoundError: There is no such cluster.
        UnavailableError: The lookup has found no servers.
        DeadlineExceededError: Not all servers were up in time.
    """
    if isinstance(given, str):
        if (url := _URL.fullmatch(given)) and (look_up := _LOOKUPS.get(url[1].lower())):
            return addresses_to_connect(look_up(url[2], timeout))
    elif isinstance(given, Sequence):
        for each in given:
            _check_no_lookup(each)
    return addresses_to_connect(given)


def _check_no_lookup(text: object) -> None:
    url = _URL.fullmatch(text) if isinstance(text, str) else None
    if url and url[1].lower() in _LOOKUPS:
        raise InvalidArgumentError(
            f"{text!r} stands for all servers of a cluster: give it alone, as a text instead of a list", field="address"
        )
