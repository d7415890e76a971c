"""Who may read what over HTTP."""

import ipaddress
import re
from collections.abc import Callable

from gradserve_server.errors import PermissionDeniedError, UnauthenticatedError
from gradserve_server.observe.http.exchange import HeadError, Request
from gradserve_server.security.credentials import Credentials, in_authorization
from gradserve_server.security.identity import ALL_CONTAINERS, Identity

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "gradserve",
    "X-Content-Type-Options": "nosniff",
}
"""The headers that every answer has."""
_HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(:[0-9]{1,5})?")


class Guard:
    """Checks every request before anything else looks at it.

    Requests that change nothing are the only ones. The Host header must be an IP address, localhost or a name that was
    allowed: a page of another site whose name leads here (DNS rebinding) shows its own name. No header lets pages of
    other sites read an answer.
    """

    def __init__(
        self, identify: Callable[[Credentials], Identity], *, asks_for_token: bool, hosts: tuple[str, ...]
    ) -> None:
        """Takes what finds out who asks.

        Args:
            identify: Returns the identity of credentials; raises UnauthenticatedError.
            asks_for_token: Whether requests have to show a token.
            hosts: The names of this server in Host headers, beside localhost.
        """
        self._identify = identify
        self._asks_for_token = asks_for_token
        self._hosts = frozenset(name.casefold().rstrip(".") for name in (*hosts, "localhost"))

    def check(self, request: Request) -> None:
        """Checks a request.

        Raises:
            HeadError: It would change something, or was not meant for this server.
        """
        if request.method not in ("GET", "HEAD"):
            raise HeadError(405, "only GET is possible here")
        hosts = request.headers.get("host", ())
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            shown = ", ".join(hosts)[:100] or "nothing"
            raise HeadError(
                421, f"expected an IP address, localhost or a name given with --http-host as the Host, got {shown!r}"
            )

    def identity(self, request: Request) -> Identity:
        """Returns who has sent a request.

        Raises:
            UnauthenticatedError: It shows no token, or an unknown one.
        """
        if not self._asks_for_token:
            return self._identify(Credentials())
        values = request.headers.get("authorization", ())
        if not values:
            raise UnauthenticatedError("expected the header Authorization: Bearer TOKEN")
        return self._identify(in_authorization(values))

    def overseer(self, request: Request) -> Identity:
        """Returns who has sent a request for figures about all containers.

        Raises:
            UnauthenticatedError: See `identity`.
            PermissionDeniedError: The sender has no role in all containers.
        """
        identity = self.identity(request)
        if ALL_CONTAINERS not in identity.roles:
            raise PermissionDeniedError(
                f'metrics are for those with a role in all containers ("*"); {identity.name!r} has none'
            )
        return identity

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["address"] or found["name"]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.casefold().rstrip(".") in self._hosts
        return True
