"""The lifetime of a resource that nobody deletes."""

import math
from dataclasses import dataclass

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_ID_BYTES, check_length

_LONGEST_SECONDS = 315_576_000_000.0
"""The longest time of protobuf's Duration, in which answers tell it: 10,000 years."""


@dataclass(frozen=True)
class Lifetime:
    """The leases that end a resource, apart from its deletion; none by default.

    Attributes:
        owner: The id of the client that it is private to, and with whose lease it ends. Empty: it is shared.
        idle_lease: Seconds without use after which it ends; None: never.

    Raises:
        InvalidArgumentError: The owner's id is too long, or the idle lease is not positive or too long.
    """

    owner: str = ""
    idle_lease: float | None = None

    def __post_init__(self) -> None:
        check_length(self.owner, MAX_ID_BYTES, "lifetime.owner_client_id")
        if self.idle_lease is not None and not 0 < self.idle_lease < math.inf:
            raise InvalidArgumentError(
                f"expected a positive idle_lease, got {self.idle_lease:g} s", field="lifetime.idle_lease"
            )
        if self.idle_lease is not None and self.idle_lease > _LONGEST_SECONDS:
            raise InvalidArgumentError(
                f"expected an idle_lease of at most 10,000 years, got {self.idle_lease:g} s",
                field="lifetime.idle_lease",
            )

    def differences(self, other: "Lifetime") -> list[str]:
        """Returns the differences from `other`, in words, without the ids of owners."""
        found = []
        if self.owner != other.owner:
            found.append("it is private to another client" if self.owner else "it is shared, not private")
        if self.idle_lease != other.idle_lease:
            found.append(f"idle_lease is {_text(self.idle_lease)}, not {_text(other.idle_lease)}")
        return found


SHARED = Lifetime()
"""The lifetime of a resource that only its deletion ends."""


def _text(seconds: float | None) -> str:
    return "None" if seconds is None else f"{seconds:g} s"
