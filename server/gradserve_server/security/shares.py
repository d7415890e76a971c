"""Fair shares of a limit among identities."""

from collections.abc import Callable
from typing import Protocol

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.security.identity import Identity
from gradserve_server.security.own_limits import OwnLimits


class Shared(Protocol):
    """A limit that all share."""

    limit: int
    used: int
    unit: str


class Shares:
    """What each identity holds of a limit.

    A part of the limit is reserved for those who hold no more than that part: however much others take, somebody new
    gets something. The anonymous identity, which everybody is without access control, has no share.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        whole: Shared,
        reserved: float,
        own_limit: Callable[[OwnLimits], int | None],
        retry_after: float | None = None,
    ) -> None:
        """Takes the limit, the fraction that is reserved, and the limit that an identity has of its own.

        Args:
            whole: The limit.
            reserved: The fraction.
            own_limit: Returns the limit of an identity of its own, None for none.
            retry_after: Seconds after which somebody who was refused may try again; None if waiting does not help.
        """
        self._whole = whole
        self._reserved = reserved
        self._own_limit = own_limit
        self._retry_after = retry_after
        self._held: dict[str, int] = {}

    def held_by(self, name: str) -> int:
        """Returns what the identity of this name holds."""
        return self._held.get(name, 0)

    def take(self, identity: Identity, amount: int = 1, *, is_counted: bool = False) -> None:
        """Adds to what an identity holds.

        Args:
            identity: The identity.
            amount: The amount.
            is_counted: Whether the limit counts the amount as used already.

        Raises:
            ResourceExhaustedError: It holds too much; nothing has changed.
        """
        if not identity.name:
            return
        whole, held = self._whole, self.held_by(identity.name)
        own = self._own_limit(identity.limits)
        if own is not None and held + amount > own:
            raise ResourceExhaustedError(
                f"too many {whole.unit} of {identity.name!r}: {amount} asked for, {held} in use, {own} allowed",
                retry_after=self._retry_after,
            )
        reserve = int(whole.limit * self._reserved)
        used = whole.used + (0 if is_counted else amount)
        if used > whole.limit - reserve and held + amount > reserve:
            raise ResourceExhaustedError(
                f"too many {whole.unit} of {identity.name!r}: {amount} asked for, {held} in use; {whole.used} of "
                f"{whole.limit} are in use altogether, and the last {reserve} are for those who use no more than that",
                retry_after=self._retry_after,
            )
        self._held[identity.name] = held + amount

    def give_back(self, name: str, amount: int = 1) -> None:
        """Subtracts from what the identity of this name holds."""
        if not name:
            return
        left = self._held[name] - amount
        if left:
            self._held[name] = left
        else:
            del self._held[name]
