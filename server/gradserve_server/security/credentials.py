"""The credentials that callers show."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from gradserve_server.security.peer import PeerCertificate

TOKEN_PREFIX = "gradserve_"
"""The beginning of tokens, by which scanners for leaked secrets can recognise them."""
_TOKEN_BYTES = 32
_SCHEME = "bearer"
_USER_SCHEME = "gradserve-user"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller has shown. It is enough that one of them is known; the first that was shown counts.

    Attributes:
        token_digest: The digest of its bearer token; empty if it showed none.
        certificate: Its checked certificate; None without one.
        uid: The user at the other end of a Unix socket, as the kernel says; None if unknown.
        is_local: Whether the call came through a Unix socket, which then may tell the user later.
        user_key: The key of its user, instead of a token; empty if it showed none.
        problem: Why what it has shown is neither; empty if it is, or if it has shown nothing.
    """

    token_digest: bytes = field(default=b"", repr=False)
    certificate: PeerCertificate | None = None
    uid: int | None = None
    is_local: bool = False
    user_key: str = field(default="", repr=False)
    problem: str = ""


NO_CREDENTIALS = Credentials()


def no_credentials() -> Credentials:
    """Returns the credentials of a caller that shows none."""
    return NO_CREDENTIALS


def in_authorization(values: Sequence[str]) -> Credentials:
    """Returns what a caller shows in the metadata `authorization`, or in the HTTP header of that name.

    Args:
        values: Its values. Only one of the form `Bearer TOKEN`, or `Gradserve-User KEY`, can be known; the scheme is
            read in any case, as everywhere in HTTP.
    """
    if not values:
        return NO_CREDENTIALS
    if len(values) > 1:
        return Credentials(problem=f"expected one authorization, got {len(values)}")
    scheme, *shown = values[0].split() or [""]
    if len(shown) == 1 and scheme.lower() == _SCHEME:
        return Credentials(digest_of(shown[0]))
    if len(shown) == 1 and scheme.lower() == _USER_SCHEME:
        return Credentials(user_key=shown[0])
    return Credentials(problem="expected the authorization Bearer TOKEN, got it in another form")


def new_token() -> str:
    """Returns a new token with 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def digest_of(token: str) -> bytes:
    """Returns the digest of a token.

    A plain hash is enough: nobody can try all values of 256 random bits.
    """
    return sha256(token.encode()).digest()
