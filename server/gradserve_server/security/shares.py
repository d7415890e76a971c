"""Limits of identities and containers, and rules for their shares of the limits that all callers have in common."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradserve_server.errors import ResourceExhaustedError
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


@dataclass(eq=False)
class ShareRules:
    """Rules for how much of a common limit an identity or a container may hold.

    Attributes:
        reserved: The fraction of each limit that is for identities that hold no more than that.
        of_identity: Returns the limits of an identity of its own, by its name.
        of_container: Returns the limits of a container.
        has_identities: Whether the server tells its callers apart.
        are_in_force: Whether anything is refused.
    """

    reserved: float = 0.0
    of_identity: Callable[[str], OwnLimits] = lambda _name: NO_LIMITS
    of_container: Callable[[str], ContainerLimits] = lambda _container: NO_CONTAINER_LIMITS
    has_identities: bool = field(default=True, kw_only=True)
    are_in_force: bool = field(default=True, init=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Refuses nothing during a block, in which a server takes back what it had before a restart."""
        self.are_in_force = False
        try:
            yield
        finally:
            self.are_in_force = True


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
