"""The policy of a server: its identities, and what they show."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradserve_server.errors import UnauthenticatedError
from gradserve_server.security.credentials import Credentials
from gradserve_server.security.identity import ALL_CONTAINERS, Identity
from gradserve_server.security.own_limits import NO_CONTAINER_LIMITS, NO_LIMITS, ContainerLimits, OwnLimits

_INDEXED_BYTES = 2


@dataclass(frozen=True)
class Policy:
    """Who is who.

    Attributes:
        by_token: The identities by the digests of their tokens.
        by_certificate: The identities by the names in their certificates.
        by_uid: The identities by the users of Unix sockets.
        limits: The limits of identities, by their names.
        containers: The limits of containers; "*" for all that have no entry of their own.
    """

    by_token: Mapping[bytes, Identity] = field(default_factory=dict, repr=False)
    by_certificate: Mapping[str, Identity] = field(default_factory=dict)
    by_uid: Mapping[int, Identity] = field(default_factory=dict)
    limits: Mapping[str, OwnLimits] = field(default_factory=dict)
    containers: Mapping[str, ContainerLimits] = field(default_factory=dict)

    def identify(self, credentials: Credentials) -> Identity:
        """Returns the identity of a caller.

        Raises:
            UnauthenticatedError: It shows nothing, or nothing that the policy knows.
        """
        if credentials.problem:
            raise UnauthenticatedError(credentials.problem)
        if credentials.token_digest:
            return self._of_token(credentials.token_digest)
        shown = credentials.certificate
        if shown is not None:
            for name in (shown.common_name, *shown.names):
                if name in self.by_certificate:
                    return self.by_certificate[name]
        if credentials.uid is not None:
            found = self.by_uid.get(credentials.uid)
            if found is None:
                raise UnauthenticatedError(f"the server does not know the user {credentials.uid} of this connection")
            return found
        if shown is not None:
            raise UnauthenticatedError("the server does not know this client certificate, and there is no token")
        raise UnauthenticatedError(
            "this server needs credentials: connect with token=, or set the environment variable GRADSERVE_TOKEN"
        )

    def limits_of(self, name: str) -> OwnLimits:
        """Returns the limits of the identity of this name; none for one that is unknown."""
        return self.limits.get(name, NO_LIMITS)

    def container_limits(self, container: str) -> ContainerLimits:
        """Returns the limits of a container."""
        return self.containers.get(container) or self.containers.get(ALL_CONTAINERS) or NO_CONTAINER_LIMITS

    def _of_token(self, digest: bytes) -> Identity:
        """Returns the identity of a token. How long that takes tells at most how the token's digest begins."""
        for known, identity in self._by_beginning.get(digest[:_INDEXED_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return identity
        raise UnauthenticatedError("the server does not know this token")

    @cached_property
    def _by_beginning(self) -> Mapping[bytes, Sequence[tuple[bytes, Identity]]]:
        found: dict[bytes, list[tuple[bytes, Identity]]] = {}
        for digest, identity in self.by_token.items():
            found.setdefault(digest[:_INDEXED_BYTES], []).append((digest, identity))
        return found
