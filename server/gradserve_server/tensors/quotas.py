"""Quotas shared by everything on the server."""

from dataclasses import dataclass

from gradserve_server.errors import ResourceExhaustedError


class Quota:
    """A limit on an amount that is in use at one time.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, limit: int, unit: str, *, each: "Cost | None" = None) -> None:
        """Takes the limit, and what is limited.

        Args:
            limit: The limit.
            unit: The unit for messages, e.g. "bytes of tensor memory".
            each: What each takes of another quota.
        """
        self.limit = limit
        self.used = 0
        self.unit = unit
        self._each = each

    def acquire(self, amount: int = 1) -> None:
        """Takes `amount`.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """
        self.check(amount)
        if self._each is not None:
            self._each.quota.acquire(self._each.amount * amount)
        self.used += amount

    def check(self, amount: int) -> None:
        """Checks that `amount` is left.

        Raises:
            ResourceExhaustedError: It is not.
        """
        if self.used + amount > self.limit:
            raise ResourceExhaustedError(
                f"too many {self.unit}: {amount} asked for, {self.used} in use, {self.limit} allowed"
            )

    def release(self, amount: int = 1) -> None:
        """Returns `amount` to the quota."""
        self.change(-amount)

    def change(self, amount: int) -> None:
        """Changes what is in use, whether or not that is within the limit."""
        self.used += amount
        if self._each is not None:
            self._each.quota.change(self._each.amount * amount)

    def hold(self, amount: int = 1) -> "Held":
        """Takes `amount` for a block, which begins with ResourceExhaustedError if that much is not left."""
        return Held(self, amount)


@dataclass(frozen=True)
class Cost:
    """What one of something takes of a quota."""

    quota: Quota
    amount: int


class Held:
    """A part of a quota that is taken during a block. Made by `Quota.hold`."""

    __slots__ = ("_amount", "_quota")

    def __init__(self, quota: Quota, amount: int) -> None:
        self._quota = quota
        self._amount = amount

    def __enter__(self) -> None:
        """Takes it."""
        self._quota.acquire(self._amount)

    def __exit__(self, *_: object) -> None:
        """Returns it."""
        self._quota.release(self._amount)


class Account:
    """One holder's share of a quota, which grows and shrinks."""

    def __init__(self, quota: Quota, used: int = 0) -> None:
        """Takes the quota, and how much of what is already taken from it is the holder's."""
        self._quota = quota
        self.used = used

    def grow(self, amount: int) -> None:
        """Takes `amount` more.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """
        self._quota.acquire(amount)
        self.used += amount

    def hand_over(self, amount: int) -> None:
        """Passes `amount` on to another holder, who returns it to the quota. Takes what it lacks from the quota.

        Raises:
            ResourceExhaustedError: That much is not left; nothing has changed.
        """
        missing = max(amount - self.used, 0)
        if missing:
            self._quota.acquire(missing)
        self.used -= amount - missing

    def take_over(self, amount: int, giver: "Account") -> None:
        """Takes `amount` more: first what another holder has reserved, then the rest from the quota.

        Raises:
            ResourceExhaustedError: The rest is not left; nothing has changed.
        """
        giver.hand_over(amount)
        self.used += amount

    def settle(self, amount: int) -> None:
        """Sets the share to `amount`, whether or not that is within the limit.

        For existing memory that only changes hands.
        """
        self._quota.change(amount - self.used)
        self.used = amount
