"""Clocks that servers of tests count leases on."""

import time

from gradserve_server.runtime.event_loop import ServiceClock


class SkippingClock(ServiceClock):
    """A clock that can be put forward.

    Attributes:
        skipped: By how many seconds it was.
    """

    def __init__(self) -> None:
        super().__init__(time.monotonic, 5.0)
        self.skipped = 0.0

    def __call__(self) -> float:
        return super().__call__() + self.skipped
