"""Calls, of which each identity has a fair share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gradserve_server.resources.quotas import Quota
from gradserve_server.security.call_rates import CallRates
from gradserve_server.security.identity import Identity
from gradserve_server.security.shares import ShareRules, Shares

_RETRY_SECONDS = 0.5


class FairCalls:
    """Counts the calls of each identity. Used on the event loop only."""

    def __init__(self, max_calls: int, rules: ShareRules) -> None:
        """Takes the most calls of all, and how many of them an identity may have."""
        self._under_way = Quota(max_calls, "calls under way")
        self._shares = Shares(self._under_way, rules, lambda limits: limits.max_calls, _RETRY_SECONDS)
        self._rates = CallRates(time.monotonic, rules.of_identity)

    @contextmanager
    def call_of(self, identity: Identity) -> Iterator[None]:
        """Counts a call of an identity while it is under way.

        Raises:
            ResourceExhaustedError: The identity has too many, or begins them too often.
        """
        share = self._shares.of(identity)
        share.take()
        try:
            self._rates.begin(identity)
            self._under_way.change(1)
        except BaseException:
            share.give_back()
            raise
        try:
            yield
        finally:
            self._under_way.change(-1)
            share.give_back()
