"""The lifetime of a resource that nobody deletes."""

import math
from dataclasses import dataclass

from gradserve_server.errors import InvalidArgumentError

MAX_CLIENT_ID_BYTES = 128


def check_client_id(client_id: str, field: str) -> None:
    """Checks the id of a client, which may be empty.

    Raises:
        InvalidArgumentError: It is too long.
    """
    num_bytes = len(client_id.encode())
    if num_bytes > MAX_CLIENT_ID_BYTES:
        raise InvalidArgumentError(f"expected at most {MAX_CLIENT_ID_BYTES} bytes, got {num_bytes}", field=field)


@dataclass(frozen=True)
class Lifetime:
    """The leases that end a resource, apart from its deletion; none by default.

    Attributes:
        owner: The id of the client that it is private to, and with whose lease it ends. Empty: it is shared.
        idle_lease: Seconds without use after which it ends; None: never.

    Raises:
        InvalidArgumentError: The owner's id is too long, or the idle lease is not positive.
    """

    owner: str = ""
    idle_lease: float | None = None

    def __post_init__(self) -> None:
        check_client_id(self.owner, "lifetime.owner_client_id")
        if self.idle_lease is not None and not 0 < self.idle_lease < math.inf:
            raise InvalidArgumentError(
                f"expected a positive idle_lease, got {self.idle_lease:g} s", field="lifetime.idle_lease"
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
