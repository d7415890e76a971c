"""What a status is to show."""

from dataclasses import dataclass
from enum import Enum

from gradserve_server.errors import InvalidArgumentError, PermissionDeniedError
from gradserve_server.limits import MAX_NAME_BYTES, check_length, quoted
from gradserve_server.observe.internal_names import run_of
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import ANONYMOUS, Identity


class Order(Enum):
    """The order of accumulators."""

    LATEST = "latest"
    """Those whose last round ended last come first; those without rounds by name."""
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
    """What a status is to show.

    Attributes:
        user: Who asks; sees what is in containers in which it has a role.
        container: The only container; empty for all of these.
        name_contains: A part of the names, whatever its case.
        order: The order of accumulators.
        max_accumulators: How many of them to describe.
        max_rounds: How many rounds of each.
        max_workers: How many workers.
    """

    user: Identity = ANONYMOUS
    container: str = ""
    name_contains: str = ""
    order: Order = Order.LATEST
    max_accumulators: int = 100
    max_rounds: int = 20
    max_workers: int = 50

    def asks_for(self, key: ResourceKey, owner: str) -> bool:
        """Returns True if it asks for what has this name and owner ("" if shared), and the user may see it.

        Internal accumulators of training runs are asked for by a part of their names that the run's own has not.
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
            InvalidArgumentError: A maximum is out of range, or a text is too long.
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
                f"the status of the container {quoted(self.container)} is for those with a role there; "
                f"{self.user.name!r} has none"
            )
