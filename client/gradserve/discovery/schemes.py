"""The servers that a client connects to: listed by their addresses, or looked up by a scheme."""

import re
from collections.abc import Callable, Mapping, Sequence

from gradserve.address import Address, addresses_to_connect
from gradserve.discovery.dns import servers_of_service
from gradserve.errors import InvalidArgumentError

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://(.*?)\s*", re.DOTALL)
_LOOKUPS: Mapping[str, Callable[[str], Sequence[str]]] = {"dns+srv": servers_of_service}
"""What looks up addresses, by the scheme: takes the text after SCHEME://, returns the addresses in their order."""


def servers_to_connect(given: str | Sequence[str]) -> tuple[Address, ...]:
    """Returns the addresses of the servers to connect to. Blocks for a few seconds at most if it has to look them up.

    Args:
        given: What `addresses_to_connect` takes, or one text that begins with one of the schemes: "dns+srv://SERVICE".

    Raises:
        InvalidArgumentError: It is none of these, or what looks it up is not installed.
        UnavailableError: The lookup has found no servers.
    """
    if isinstance(given, str):
        if (url := _URL.fullmatch(given)) and (look_up := _LOOKUPS.get(url[1].lower())):
            return addresses_to_connect(look_up(url[2]))
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
