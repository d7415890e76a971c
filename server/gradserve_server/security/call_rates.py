"""How often an identity calls."""

from collections.abc import Callable

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.security.identity import Identity
from gradserve_server.security.own_limits import OwnLimits

_PRUNED_AT = 1024


class CallRates:
    """Limits the calls that each identity begins in a second.

    After a pause, it may begin the calls of a whole second at once. Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float], limits_of: Callable[[str], OwnLimits]) -> None:
        """Takes a monotonic clock in seconds, and what returns the limits of an identity by its name."""
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
