"""The identities of callers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradserve_server.security.roles import Role

ALL_CONTAINERS = "*"
MAX_IDENTITY_BYTES = 64
"""The longest name of an identity."""


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
"""The identity of everybody on a server without access control."""


def owner_named(name: str) -> Identity:
    """Returns the identity of this name, which reaches what belongs to it and nothing else; ANONYMOUS for no name."""
    return Identity(name) if name else ANONYMOUS


def owner_of(owned_id: str) -> Identity:
    """Returns the identity to which an id belongs that `own` returned, as `owner_named` does."""
    name, separator, _ = owned_id.partition("/")
    return owner_named(name if separator else "")
