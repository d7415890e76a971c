"""The calls on parameters that wait: for the end of a round, or for their turn to create parameters of a name."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gradserve_server.accumulators.rounds import ClosingRule, Members
from gradserve_server.accumulators.waits import TakeQueue, Waiter
from gradserve_server.errors import DeadlineExceededError, ServiceError
from gradserve_server.parameters.closing import End, Overdue
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.resources.registry import ResourceKey

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


_SHORTEST_TURN_SECONDS = 10.0
"""The time for which a creator has the turn, whatever the size of its values."""
_SLOWEST_BYTES = 20e6
"""The bytes per second of the slowest creator for which the others wait. That time comes on top."""
_MOST_TURNS = 1024


@dataclass(frozen=True)
class _Turn:
    """The turn of one client to create parameters.

    Attributes:
        creator: The client's text.
        until: The time at which somebody else may take the turn.
        is_over: Resolved when it has ended before.
    """

    creator: str
    until: float
    is_over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Creators:
    """Gives one client after the other the turn to create parameters of a name. Used on the event loop only.

    A turn ends when its creator has created the parameters or failed to, or after 10 s and the time that the values
    take at 20 MB/s: the creator may have died. At most 1024 names have a turn at once; for further ones, every client
    has the turn at once.
    """

    def __init__(self) -> None:
        self._turns: dict[ResourceKey, _Turn] = {}
        self._closed: ServiceError | None = None

    def __len__(self) -> int:
        return len(self._turns)

    async def turn(
        self, key: ResourceKey, creator: str, num_bytes: int, exists: Callable[[], bool], timeout: float | None
    ) -> None:
        """Returns when the parameters exist, or it is this client's turn to create them.

        Args:
            key: Their name.
            creator: A text that no other client uses. The turn is the same if the client asks again.
            num_bytes: The size of the values that it would send.
            exists: Returns True if the parameters exist.
            timeout: The seconds to wait; None for no limit.

        Raises:
            DeadlineExceededError: Another client had the turn all the time.
            ServiceError: What `close` was called with.
        """
        try:
            async with asyncio.timeout(timeout):
                while not exists() and not self._take(key, creator, num_bytes):
                    turn = self._turns[key]
                    remaining = max(turn.until - asyncio.get_running_loop().time(), 0.0)
                    await asyncio.wait([turn.is_over], timeout=remaining)
                    if self._closed is not None:
                        raise self._closed
        except TimeoutError:
            raise DeadlineExceededError(
                f"another client was about to create parameters {str(key)!r}, and has not done so within {timeout:g} s",
                field="parameters.name",
                code="GS_NO_CREATOR",
            ) from None

    def end(self, key: ResourceKey, creator: str | None = None) -> None:
        """Ends the turn of a creator, or any turn if that is None; the next client has it then."""
        turn = self._turns.get(key)
        if turn is not None and creator in (None, turn.creator):
            del self._turns[key]
            turn.is_over.set_result(None)

    def close(self, error: ServiceError) -> None:
        """Ends every wait with an error."""
        self._closed = error
        for key in list(self._turns):
            self.end(key)

    def _take(self, key: ResourceKey, creator: str, num_bytes: int) -> bool:
        now = asyncio.get_running_loop().time()
        turn = self._turns.get(key)
        if turn is not None and turn.until > now and turn.creator != creator:
            return False
        self.end(key)
        if len(self._turns) >= _MOST_TURNS:
            for other in [other for other, turn in self._turns.items() if turn.until <= now]:
                self.end(other)
        if len(self._turns) < _MOST_TURNS:
            self._turns[key] = _Turn(creator, now + _SHORTEST_TURN_SECONDS + num_bytes / _SLOWEST_BYTES)
        return True
