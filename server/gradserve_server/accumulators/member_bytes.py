"""The memory of what is kept of the members of a round, beside the values of their gradients."""

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.ledger import Ledger
from gradserve_server.resources.quotas import Account, Quota

_WORKER_BYTES = 512
"""The memory of the id of a worker, at most."""
_HELD_BYTES = 1280
"""The memory of a gradient that is held for its order, beside its values."""


class MemberBytes:
    """Counts the memory of the members of one accumulator's rounds."""

    def __init__(self, quota: Quota, ledger: Ledger, *, holds_gradients: bool) -> None:
        """Takes the quota of bytes, the ledger, and whether gradients are held until the end of their round."""
        self._account = Account(quota)
        self._ledger = ledger
        self._held_bytes = _HELD_BYTES if holds_gradients else 0
        self._is_closed = False
        self.settle()

    def grow(self, contribution: Contribution) -> None:
        """Counts a member that is about to join; `settle` follows, whether it does or not.

        Raises:
            ResourceExhaustedError: There is no room for it.
        """
        num_new = sum([self._ledger.is_new(each) for each in contribution.workers])
        cost = _WORKER_BYTES * num_new + self._held_bytes * contribution.num_gradients
        if cost:
            self._account.grow(cost)

    def settle(self) -> None:
        """Counts the members that there are; none once it is closed."""
        held = self._held_bytes * self._ledger.rounds.num_accumulated
        self._account.settle(0 if self._is_closed else _WORKER_BYTES * self._ledger.num_named + held)

    def close(self) -> None:
        """Gives everything back."""
        self._is_closed = True
        self.settle()
