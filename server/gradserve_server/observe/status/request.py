"""Requests for the status of a server."""

import re
from dataclasses import dataclass
from enum import Enum

from gradserve_server.errors import InvalidArgumentError, PermissionDeniedError
from gradserve_server.limits import MAX_NAME_BYTES, check_length, quoted
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import ANONYMOUS, Identity

_BESIDE_A_RUN = re.compile(r"(.+)/[0-9a-f]{40}/.+", re.DOTALL)
"""NAME/INCARNATION/PURPOSE: internal accumulators of `gradserve.training`, e.g. for initial parameters."""


def run_of(name: str) -> str | None:
    """Returns the training run to which an internal accumulator belongs; None if the accumulator is not internal."""
    found = _BESIDE_A_RUN.fullmatch(name)
    return None if found is None else found[1]


class Order(Enum):
    """The order of accumulators."""

    LATEST = "latest"
    """Most recent round first; accumulators without rounds by name."""
    NAME = "name"
    """By container and name."""
    RATE = "rate"
    """The most rounds per second first."""
    WAITING = "waiting"
    """The most waiting calls first."""
    BYTES = "bytes"
    """The most memory first."""


@dataclass(frozen=True)
class StatusRequest:
    """A request for the status of a server.

    Attributes:
        user: The caller, who sees the containers in which it has a role.
        container: The only container to show; empty for all of these.
        name_contains: Shows only names that contain this, in any case.
        order: The order of accumulators.
        max_accumulators: The most accumulators to describe.
        max_rounds: The most rounds of each.
        max_workers: The most workers.
    """

    user: Identity = ANONYMOUS
    container: str = ""
    name_contains: str = ""
    order: Order = Order.LATEST
    max_accumulators: int = 100
    max_rounds: int = 20
    max_workers: int = 50

    def asks_for(self, key: ResourceKey, owner: str) -> bool:
        """Returns True if it covers the thing with this key and owner ("" if shared), and the user may see that.

        It covers a training run's internal accumulator only if `name_contains` does not also match the run's name.
        """
        if self.container not in ("", key.container) or self.user.role_in(key.container) is None:
            return False
        if owner and not self.user.reaches_id(owner):
            return False
        wanted = self.name_contains.casefold()
        run = run_of(key.name)
        if run is not None and wanted in str(ResourceKey(key.container, run, key.user)).casefold():
            return False
        return wanted in str(key).casefold()

    def __post_init__(self) -> None:
        """Checks the request.

        Raises:
            InvalidArgumentError: A maximum is out of range, or a string is too long.
            PermissionDeniedError: The user has no role in the container.
        """
        for name in ("container", "name_contains"):
            check_length(getattr(self, name), MAX_NAME_BYTES, name)
        for name, most in (("max_accumulators", 1000), ("max_rounds", 20), ("max_workers", 1000)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InvalidArgumentError(f"expected 1 to {most}, got {value}", field=name)
        if self.container and self.user.role_in(self.container) is None:
            raise PermissionDeniedError(
                f"the status of the container {quoted(self.container)} needs a role there; {self.user.name!r} has none"
            )
