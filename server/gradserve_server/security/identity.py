"""Callers: the credentials that they present, and their identities with roles."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Any

TOKEN_PREFIX = "gradserve_"
"""The beginning of tokens, by which scanners for leaked secrets can recognise them."""
_TOKEN_BYTES = 32
_SCHEME = "bearer"
_USER_SCHEME = "gradserve-user"
ALL_CONTAINERS = "*"
MAX_IDENTITY_BYTES = 64
"""The longest name of an identity."""


class Role(IntEnum):
    """The rights of an identity in a container. Each role includes the roles before it."""

    WORKER = 1
    """Use what exists: gradients, averages, forwards, tensors, ops."""
    CHIEF = 2
    """Also create, delete and change it: takes, steps, updates, variables."""
    ADMIN = 3
    """Everything. An admin of all containers also reaches what belongs to other identities."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Identity:
    """A caller, and everything that it may do.

    Attributes:
        name: Its name. It has no "/", which ends it in the ids of what belongs to it.
        roles: Its roles by container; "*" for all containers that have no entry of their own.
    """

    name: str
    roles: Mapping[str, Role] = field(default_factory=dict, repr=False, hash=False)

    def role_in(self, container: str) -> Role | None:
        """Returns its role in a container, None if it has none."""
        return self.roles.get(container) or self.roles.get(ALL_CONTAINERS)

    @property
    def highest_role(self) -> Role | None:
        """The highest of its roles in any container, None if it has none."""
        return max(self.roles.values(), default=None)

    @property
    def reaches_all(self) -> bool:
        """True if it may use what belongs to other identities."""
        return self.roles.get(ALL_CONTAINERS) is Role.ADMIN

    def reaches(self, owner: str) -> bool:
        """Returns True if it may use what belongs to the identity of this name."""
        return owner == self.name or self.reaches_all

    def own(self, chosen_id: str) -> str:
        """Returns an id that a client chose as the server knows it: different for every identity. Empty stays empty."""
        prefix = f"{self.name}/" if self.name else ""
        return chosen_id if not chosen_id or chosen_id.startswith(prefix) else prefix + chosen_id

    def named(self, forward_id: str) -> str:
        """Returns the id of a forward that a call for all identities names, with or without its owner."""
        return forward_id if "/" in forward_id else self.own(forward_id)

    def reaches_id(self, owned_id: str) -> bool:
        """Returns True if it may use what has an id that `own` returned to somebody."""
        return self.reaches_all or owned_id.startswith(f"{self.name}/")


ANONYMOUS = Identity("", {ALL_CONTAINERS: Role.ADMIN})
"""The identity of all callers on a server without access control."""


def owner_named(name: str) -> Identity:
    """Returns the identity of this name, which reaches what belongs to it and nothing else; ANONYMOUS for no name."""
    return Identity(name) if name else ANONYMOUS


def owner_of(owned_id: str) -> Identity:
    """Returns the identity to which an id belongs that `own` returned, as `owner_named` does."""
    name, separator, _ = owned_id.partition("/")
    return owner_named(name if separator else "")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a caller. One that the server knows is enough; the first of them counts.

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


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """The certificate of a client, which an authority of `--tls-client-ca` has signed.

    Attributes:
        common_name: The common name of its subject; empty if it has none.
        names: Its alternative names, of DNS and URI.
    """

    common_name: str
    names: tuple[str, ...] = ()

    @classmethod
    def of_socket(cls, shown: Mapping[str, Any] | None) -> PeerCertificate | None:
        """Returns the certificate that `ssl.SSLSocket.getpeercert` describes; None for none."""
        if not shown:
            return None
        subject = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
        alternatives = shown.get("subjectAltName", ())
        return cls(
            subject[0] if subject else "",
            (
                *(name for kind, name in alternatives if kind == "DNS"),
                *(n for kind, n in alternatives if kind == "URI"),
            ),
        )

    @classmethod
    def of_properties(cls, properties: Mapping[str, Sequence[bytes]]) -> PeerCertificate | None:
        """Returns the certificate in gRPC's properties of a connection; None for none."""
        if "x509_pem_cert" not in properties:
            return None
        common = properties.get("x509_common_name", ())
        names = (*properties.get("peer_dns", ()), *properties.get("peer_uri", ()))
        return cls(common[0].decode() if common else "", tuple(each.decode() for each in names))
