"""What calls over gRPC show of who makes them."""

from typing import Self

from gradserve.address import Address
from gradserve.transport.settings import ConnectionSettings


class Shown:
    """The token of a client, or the key of its user: a server's Unix socket for shared memory has keys for its users.

    Safe to use from several threads.

    Attributes:
        metadata: The metadata of calls.
        takes_key: Whether calls may show the key of the user.
    """

    def __init__(self, metadata: tuple[tuple[str, str], ...] = (), *, takes_key: bool = False) -> None:
        self.metadata = metadata
        self.takes_key = takes_key

    @classmethod
    def to(cls, address: Address, settings: ConnectionSettings) -> Self:
        """Returns what calls to a server show."""
        if settings.token is not None:
            return cls(settings.token.metadata)
        return cls(takes_key=bool(address.path))

    @property
    def is_something(self) -> bool:
        """True if calls show anything, now or later."""
        return self.takes_key or bool(self.metadata)

    def show_user(self, key: str) -> None:
        """Shows a key of the user from now on."""
        self.metadata = (("authorization", f"Gradserve-User {key}"),)
