"""Calls, of which each identity has a fair share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gradserve_server.security.call_rates import CallRates
from gradserve_server.security.identity import Identity
from gradserve_server.security.shares import Shares
from gradserve_server.tensors.quotas import Quota

_RETRY_SECONDS = 0.5


class FairCalls:
    """Counts the calls of each identity. Used on the event loop only."""

    def __init__(self, max_calls: int, reserved: float) -> None:
        """Takes the most calls of all, and the fraction of them that is reserved for those who make few."""
        self._under_way = Quota(max_calls, "calls under way")
        self._shares = Shares(self._under_way, reserved, lambda limits: limits.max_calls, _RETRY_SECONDS)
        self._rates = CallRates(time.monotonic)

    @contextmanager
    def call_of(self, identity: Identity) -> Iterator[None]:
        """Counts a call of an identity while it is under way.

        Raises:
            ResourceExhaustedError: The identity has too many, or begins them too often.
        """
        self._shares.take(identity)
        try:
            self._rates.begin(identity)
            self._under_way.change(1)
        except BaseException:
            self._shares.give_back(identity.name)
            raise
        try:
            yield
        finally:
            self._under_way.change(-1)
            self._shares.give_back(identity.name)
