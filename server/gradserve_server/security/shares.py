"""Limits of identities and containers, and fair shares of the limits that all callers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol
from weakref import WeakValueDictionary

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.limits import quoted
from gradserve_server.security.identity import Identity

_PRUNED_AT = 1024


@dataclass(frozen=True)
class OwnLimits:
    """The limits of one identity, besides those that all share; None for none of its own.

    Attributes:
        max_bytes: The bytes of its stored tensors, accumulators, layers and forwards.
        max_handles: Its stored tensors and forwards.
        max_calls: Its calls under way, those that wait included.
        max_waiters: Its calls that wait for averages.
        calls_per_second: How many calls it may begin in a second, and at once after a pause.
        max_connections: Its connections to sockets.
        max_region_bytes: The memory that its clients share with the server.
        max_device_bytes: The bytes that it takes of the device's memory.
    """

    max_bytes: int | None = None
    max_handles: int | None = None
    max_calls: int | None = None
    max_waiters: int | None = None
    calls_per_second: float | None = None
    max_connections: int | None = None
    max_region_bytes: int | None = None
    max_device_bytes: int | None = None


NO_LIMITS = OwnLimits()


@dataclass(frozen=True)
class ContainerLimits:
    """The limits of one container; None for none of its own.

    Attributes:
        max_bytes: The bytes of its accumulators, layers and forwards.
        max_accumulators: Its accumulators.
        max_layers: Its layers.
        max_waiters: The calls that wait for averages of its accumulators.
    """

    max_bytes: int | None = None
    max_accumulators: int | None = None
    max_layers: int | None = None
    max_waiters: int | None = None


NO_CONTAINER_LIMITS = ContainerLimits()


def _no_limits(_name: str) -> OwnLimits:
    return NO_LIMITS


def _no_container_limits(_container: str) -> ContainerLimits:
    return NO_CONTAINER_LIMITS


class ShareRules:
    """Rules for how much of a common limit an identity or a container may hold.

    Attributes:
        reserved: The fraction of each limit that is for identities that hold no more than that.
        of_identity: Returns the limits of an identity of its own, by its name.
        of_container: Returns the limits of a container.
        has_identities: Whether the server tells its callers apart.
        are_in_force: Whether anything is refused.
    """

    def __init__(
        self,
        reserved: float = 0.0,
        of_identity: Callable[[str], OwnLimits] = _no_limits,
        of_container: Callable[[str], ContainerLimits] = _no_container_limits,
        *,
        has_identities: bool = True,
    ) -> None:
        self.reserved = reserved
        self.of_identity = of_identity
        self.of_container = of_container
        self.has_identities = has_identities
        self.are_in_force = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Refuses nothing during a block, in which a server takes back what it had before a restart."""
        self.are_in_force = False
        try:
            yield
        finally:
            self.are_in_force = True


class Shared(Protocol):
    """A limit that all share."""

    limit: int
    used: int
    unit: str


class Share:
    """The amount of a limit that one identity or container holds.

    Attributes:
        name: Its name.
        held: What it holds.

    Not thread-safe: used on the event loop only.
    """

    __slots__ = ("__weakref__", "_refuse", "held", "name")

    def __init__(self, name: str, refuse: Callable[[Share, int, int], None]) -> None:
        self.name = name
        self.held = 0
        self._refuse = refuse

    def check(self, amount: int, counted: int = 0) -> None:
        """Checks that it may hold `amount` more, of which the limit counts `counted` as used already.

        Raises:
            ResourceExhaustedError: It may not.
        """
        if amount > 0:
            self._refuse(self, amount, counted)

    def take(self, amount: int = 1) -> None:
        """Adds to what it holds.

        Raises:
            ResourceExhaustedError: It would hold too much; nothing has changed.
        """
        self.check(amount)
        self.held += amount

    def give_back(self, amount: int = 1) -> None:
        """Subtracts from what it holds."""
        self.held -= amount


class _SharesByName(ABC):
    def __init__(
        self, whole: Shared, rules: ShareRules, shares: MutableMapping[str, Share], retry_after: float | None
    ) -> None:
        self._whole = whole
        self._rules = rules
        self._shares = shares
        self._retry_after = retry_after

    def named(self, name: str) -> Share:
        """Returns the share of this name."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name, self._refuse)
        return share

    def held_by(self, name: str) -> int:
        """Returns what the share of this name holds."""
        share = self._shares.get(name)
        return 0 if share is None else share.held

    @abstractmethod
    def _refuse(self, share: Share, amount: int, counted: int) -> None:
        """Raises ResourceExhaustedError if a share may not have `amount` more; see `Share.check`."""


class Shares(_SharesByName):
    """The amounts of a limit that identities hold.

    A part of the limit is reserved for those who hold no more than that part: however much others take, somebody new
    gets something. The anonymous identity, which everybody is without access control, is refused nothing.
    """

    def __init__(
        self,
        whole: Shared,
        rules: ShareRules,
        own_limit: Callable[[OwnLimits], int | None],
        retry_after: float | None = None,
    ) -> None:
        """Takes the limit, the rules, and which limit an identity has of its own.

        Args:
            whole: The limit.
            rules: The rules.
            own_limit: Picks the limit of an identity of its own, None for none.
            retry_after: Seconds after which somebody who was refused may try again; None if waiting does not help.
        """
        super().__init__(whole, rules, {}, retry_after)  # Never removed: the access file names all of them.
        self._own_limit = own_limit

    def of(self, identity: Identity) -> Share:
        """Returns the share of an identity."""
        return self.named(identity.name)

    def missing(self, name: str, amount: int) -> int:
        """Returns how much an identity must give back before its own limit lets it take `amount`; 0 if it does."""
        own = self._own_limit(self._rules.of_identity(name)) if name else None
        return 0 if own is None else max(self.held_by(name) + amount - own, 0)

    def __iter__(self) -> Iterator[Share]:
        """Iterates over the shares of all identities that have a name."""
        return (share for name, share in self._shares.items() if name)

    def _refuse(self, share: Share, amount: int, counted: int) -> None:
        whole, rules, held = self._whole, self._rules, share.held
        if not share.name or not rules.are_in_force:
            return
        own = self._own_limit(rules.of_identity(share.name))
        if own is not None and held + amount > own:
            raise ResourceExhaustedError(
                f"too many {whole.unit} of {share.name!r}: {amount} asked for, {held} in use, {own} allowed",
                retry_after=self._retry_after,
            )
        reserve = int(whole.limit * rules.reserved)
        if whole.used + amount - counted > whole.limit - reserve and held + amount > reserve:
            raise ResourceExhaustedError(
                f"too many {whole.unit} of {share.name!r}: {amount} asked for, {held} in use; {whole.used} of "
                f"{whole.limit} are in use altogether, and the last {reserve} are for those who use no more than that",
                retry_after=self._retry_after,
            )


class ContainerShares(_SharesByName):
    """The amounts of a limit that containers hold."""

    def __init__(
        self,
        whole: Shared,
        rules: ShareRules,
        own_limit: Callable[[ContainerLimits], int | None],
        retry_after: float | None = None,
    ) -> None:
        # Clients choose the names, so a share lives only as long as somebody counts in it.
        super().__init__(whole, rules, WeakValueDictionary(), retry_after)
        self._own_limit = own_limit

    def names(self, most: int) -> list[str]:
        """Returns the names of containers in which something may be, at most so many."""
        return list(islice(self._shares, most))

    def _refuse(self, share: Share, amount: int, _counted: int) -> None:
        if not self._rules.are_in_force:
            return
        own = self._own_limit(self._rules.of_container(share.name))
        if own is not None and share.held + amount > own:
            raise ResourceExhaustedError(
                f"too many {self._whole.unit} in the container {quoted(share.name)}: {amount} asked for, "
                f"{share.held} in use, {own} allowed",
                retry_after=self._retry_after,
            )


class CallRates:
    """Limits the calls that each identity begins in a second.

    After a pause, it may begin the calls of a whole second at once. Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float], limits_of: Callable[[str], OwnLimits]) -> None:
        self._clock = clock
        self._limits_of = limits_of
        self._next: dict[str, float] = {}
        """The time at which the calls of each identity would have begun, were they evenly spaced."""

    def begin(self, identity: Identity) -> None:
        """Counts a call.

        Raises:
            ResourceExhaustedError: There were too many; this one does not count.
        """
        rate = self._limits_of(identity.name).calls_per_second
        if rate is None:
            return
        now = self._clock()
        if len(self._next) > _PRUNED_AT:
            self._next = {name: time for name, time in self._next.items() if time > now}
        time = max(self._next.get(identity.name, now), now)
        burst = max(1.0, 1.0 / rate)
        if time + 1.0 / rate > now + burst + 1e-9:
            wait = time + 1.0 / rate - now - burst
            raise ResourceExhaustedError(
                f"too many calls of {identity.name!r}: {rate:g} in a second are allowed; try again in {wait:.3g} s",
                retry_after=wait,
            )
        self._next[identity.name] = time + 1.0 / rate
