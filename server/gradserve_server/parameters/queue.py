"""The calls that wait for a round of parameters, which ends by itself."""

import asyncio
from collections.abc import Callable

from gradserve_server.accumulators.rounds import ClosingRule, Members
from gradserve_server.accumulators.waits import TakeQueue, Waiter
from gradserve_server.errors import DeadlineExceededError
from gradserve_server.parameters.closing import End, Overdue
from gradserve_server.parameters.ledger import UpdateLedger

OVERDUE_FIELD = "spec.rounds.deadline"
"""The field of the error of calls that waited for a round whose own deadline has passed with too few updates."""
_SHORTEST_SECONDS = 0.001
"""The shortest wait for a time: clocks may differ in how they round."""
_RETRY_SECONDS = 1.0
"""The pause after a round that could not end, because there was no memory or no disk for its version."""


class UpdateQueue(TakeQueue):
    """Ends a round when the closer says so, and wakes up at the time at which that is to be asked again.

    Attributes:
        wake: Called at that time.
    """

    def __init__(self, name: str, ledger: UpdateLedger) -> None:
        super().__init__()
        self._name = name
        self._ledger = ledger
        self._retry_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.wake: Callable[[], object] = lambda: None

    @property
    def num_required(self) -> int:
        """The number of updates that the round needs."""
        return self._ledger.closer.rules.num_required

    def head(self, members: Members) -> Waiter | None:
        """Returns what waits for the end of the round, if it ends now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed is not None:
            return None  # the round ends no more, whatever the closer says
        now = self._ledger.now
        if self._retry_at is not None and now < self._retry_at:
            self._wake_at(self._retry_at, now)
            return None
        self._retry_at = None
        ledger = self._ledger
        verdict = ledger.closer.verdict(now, ledger.is_alive)
        if isinstance(verdict, Overdue):
            self.fail_pulls(self._overdue(verdict))
            ledger.closer.fail_deadline(now)
            verdict = ledger.closer.verdict(now, ledger.is_alive)
        if isinstance(verdict, End):
            ledger.reason = verdict.reason
            return self.end_of_round()
        if isinstance(verdict, Overdue):  # its deadline is too short for the clock
            self._wake_at(now, now)
        elif verdict.until is not None:
            self._wake_at(ledger.next_look(verdict.until), now)
        return None

    def end_of_round(self) -> Waiter:
        """Returns what stands for all who wait for the end of the round."""
        return _RoundEnd(self, self.num_required)

    def failed(self, error: Exception) -> None:
        """Fails the calls that wait for the round, which could not end; it is tried again a little later."""
        self._retry_at = self._ledger.now + _RETRY_SECONDS
        self.fail_pulls(error)

    def close(self, error: Exception) -> None:
        """Fails all waiters, and later ones too."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        super().close(error)

    def _wake_at(self, time: float, now: float) -> None:
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(max(time - now, _SHORTEST_SECONDS), self.wake)

    def _overdue(self, verdict: Overdue) -> DeadlineExceededError:
        def named(workers: tuple[str, ...]) -> str:
            return ", ".join(map(repr, workers[:20])) + (f" and {len(workers) - 20} more" if len(workers) > 20 else "")

        gone = f"; clients that have left: {named(verdict.gone)}" if verdict.gone else ""
        return DeadlineExceededError(
            f"the round of parameters {self._name!r} did not get the {verdict.num_needed} updates that it needs within "
            f"its deadline of {self._ledger.closer.rules.deadline:g} s: {verdict.num_updates} are in, of workers "
            f"{named(verdict.came) or 'without names'}; missing: {named(verdict.missing) or 'unknown'}{gone}. The "
            "updates stay in the round",
            field=OVERDUE_FIELD,
            code="GS_ROUND_INCOMPLETE",
        )


class _RoundEnd(Waiter):
    """Stands for all who wait for the end of the round that ends now."""

    def __init__(self, queue: UpdateQueue, num_required: int) -> None:
        super().__init__(ClosingRule(num_required))
        self._queue = queue

    def fail(self, error: Exception) -> None:
        """Fails the calls that wait for the round."""
        super().fail(error)
        self._queue.failed(error)
