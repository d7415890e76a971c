"""Callers: their credentials, their identities with roles, and the limits and shares of each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Any

from gradserve_server.errors import ResourceExhaustedError

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


_PRUNED_AT = 1024


@dataclass(frozen=True)
class OwnLimits:
    """The limits of one identity, besides those that all share; None for none of its own.

    Attributes:
        max_bytes: The bytes of its stored tensors, accumulators, layers and forwards.
        max_handles: Its stored tensors and forwards.
        max_calls: Its calls under way, those that wait included.
        max_waiters: Its calls that wait for averages.
        calls_per_second: How many calls it may begin in a second, and at once after a pause.
        max_connections: Its connections to sockets.
        max_region_bytes: The memory that its clients share with the server.
        max_device_bytes: The bytes that it takes of the device's memory.
    """

    max_bytes: int | None = None
    max_handles: int | None = None
    max_calls: int | None = None
    max_waiters: int | None = None
    calls_per_second: float | None = None
    max_connections: int | None = None
    max_region_bytes: int | None = None
    max_device_bytes: int | None = None


NO_LIMITS = OwnLimits()


@dataclass(frozen=True)
class ContainerLimits:
    """The limits of one container; None for none of its own.

    Attributes:
        max_bytes: The bytes of its accumulators, layers and forwards.
        max_accumulators: Its accumulators.
        max_layers: Its layers.
        max_waiters: The calls that wait for averages of its accumulators.
    """

    max_bytes: int | None = None
    max_accumulators: int | None = None
    max_layers: int | None = None
    max_waiters: int | None = None


NO_CONTAINER_LIMITS = ContainerLimits()


@dataclass(eq=False)
class ShareRules:
    """Rules for how much of a common limit an identity or a container may hold.

    Attributes:
        reserved: The fraction of each limit that is for identities that hold no more than that.
        of_identity: Returns the limits of an identity of its own, by its name.
        of_container: Returns the limits of a container; None if no container has any.
        has_identities: Whether the server tells its callers apart.
        are_in_force: Whether anything is refused.
    """

    reserved: float = 0.0
    of_identity: Callable[[str], OwnLimits] = lambda _name: NO_LIMITS
    of_container: Callable[[str], ContainerLimits] | None = None
    has_identities: bool = field(default=True, kw_only=True)
    are_in_force: bool = field(default=True, init=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Refuses nothing during a block, in which a server takes back what it had before a restart."""
        self.are_in_force = False
        try:
            yield
        finally:
            self.are_in_force = True


class CallRates:
    """Limits the calls that each identity begins in a second.

    After a pause, it may begin the calls of a whole second at once. Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float], limits_of: Callable[[str], OwnLimits]) -> None:
        self._clock = clock
        self._limits_of = limits_of
        self._next: dict[str, float] = {}
        """The time at which the calls of each identity would have begun, were they evenly spaced."""

    def begin(self, identity: Identity) -> None:
        """Counts a call.

        Raises:
            ResourceExhaustedError: There were too many; this one does not count.
        """
        rate = self._limits_of(identity.name).calls_per_second
        if rate is None:
            return
        now = self._clock()
        if len(self._next) > _PRUNED_AT:
            self._next = {name: time for name, time in self._next.items() if time > now}
        time = max(self._next.get(identity.name, now), now)
        burst = max(1.0, 1.0 / rate)
        if time + 1.0 / rate > now + burst + 1e-9:
            wait = time + 1.0 / rate - now - burst
            raise ResourceExhaustedError(
                f"too many calls of {identity.name!r}: {rate:g} in a second are allowed; try again in {wait:.3g} s",
                retry_after=wait,
                code="GS_RATE",
            )
        self._next[identity.name] = time + 1.0 / rate
