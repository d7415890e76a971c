"""Limits that are shared by everything the server holds."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradserve_server.errors import ResourceExhaustedError


class Quota:
    """A number of things, of which at most `limit` may be in use at once.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, limit: int, unit: str) -> None:
        """Takes the `unit` to name in messages, e.g. "bytes of tensor memory"."""
        self.limit = limit
        self.used = 0
        self._unit = unit

    def acquire(self, amount: int = 1) -> None:
        """Takes `amount`.

        Raises:
            ResourceExhaustedError: They are not left; nothing was taken.
        """
        if self.used + amount > self.limit:
            raise ResourceExhaustedError(
                f"too many {self._unit}: {amount} asked for, {self.used} in use, {self.limit} allowed"
            )
        self.used += amount

    def release(self, amount: int = 1) -> None:
        """Gives `amount` back."""
        self.used -= amount

    @contextmanager
    def hold(self, amount: int = 1) -> Iterator[None]:
        """Takes `amount` for the length of a block.

        Raises:
            ResourceExhaustedError: They are not left.
        """
        self.acquire(amount)
        try:
            yield
        finally:
            self.release(amount)


class Account:
    """What one holder has of a quota, changed as it grows and shrinks."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self.used = 0

    def grow(self, amount: int) -> None:
        """Takes `amount` more.

        Raises:
            ResourceExhaustedError: They are not left; nothing was taken.
        """
        self._quota.acquire(amount)
        self.used += amount

    def hand_over(self, amount: int) -> None:
        """Makes `amount` somebody else's, who gives it back. What is not here is taken from the quota.

        Raises:
            ResourceExhaustedError: That is not left; nothing has changed.
        """
        missing = max(amount - self.used, 0)
        if missing:
            self._quota.acquire(missing)
        self.used -= amount - missing

    def take_over(self, amount: int, giver: "Account") -> None:
        """Takes `amount` more, from what another holder reserved as far as that goes.

        Raises:
            ResourceExhaustedError: The rest is not left; nothing has changed.
        """
        giver.hand_over(amount)
        self.used += amount

    def settle(self, amount: int) -> None:
        """Makes `amount` the holding, whether that is within the limit or not.

        For memory that is there already and only changes hands.
        """
        self._quota.used += amount - self.used
        self.used = amount
