"""The queue of calls that wait for the end of a round, first in, first out."""

import asyncio
from collections import OrderedDict

from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Round


class Waiter:
    """One take that is to be served.

    Attributes:
        num_required: How many gradients it needs.
        round: For a push_pull the round it is in, any end of which serves it; None for a take.
        call: The id of the first call that waits for it, if it has one.
        answer: Resolved with the average, or with the error that ended the wait; cancelled when the last call
            that waited for it gave up.
        listeners: Calls that wait for the answer; a retry joins the first call here.
        serving: Its average is being computed: from now on it will be served.
    """

    def __init__(self, num_required: int, *, call: RequestId | None = None) -> None:
        self.num_required = num_required
        self.call = call
        self.round: Round | None = None
        self.answer: asyncio.Future[Average] = asyncio.get_running_loop().create_future()
        # An answer that comes after everybody left is not an error.
        self.answer.add_done_callback(_retrieve)
        self.listeners = 0
        self.serving = False


def _retrieve(answer: "asyncio.Future[Average]") -> None:
    if not answer.cancelled():
        answer.exception()


class TakeQueue:
    """A strict queue: whoever is at its head holds up all behind, however little they need."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._by_round: dict[Round, dict[Waiter, None]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def append(self, waiter: Waiter) -> None:
        """Puts a waiter at the end."""
        self._waiters[waiter] = None
        if waiter.round is not None:
            self._by_round.setdefault(waiter.round, {})[waiter] = None

    def head(self, num_accumulated: int) -> Waiter | None:
        """Returns the first waiter if `num_accumulated` gradients are enough for it."""
        first = next(iter(self._waiters), None)
        return first if first is not None and num_accumulated >= first.num_required else None

    def remove(self, waiter: Waiter) -> None:
        """Takes a waiter out, wherever it stands; one that is not in is passed over."""
        self._waiters.pop(waiter, None)
        if waiter.round in self._by_round:
            peers = self._by_round[waiter.round]
            peers.pop(waiter, None)
            if not peers:
                del self._by_round[waiter.round]

    def serve(self, head: Waiter, closed: Round, average: Average) -> None:
        """Answers the head of the queue, and every push_pull whose round has ended."""
        served = [head, *self._by_round.get(closed, ())]
        for waiter in served:
            self.remove(waiter)
            if not waiter.answer.done():
                waiter.answer.set_result(average)

    def fail_all(self, error: Exception) -> None:
        """Answers everybody with an error."""
        for waiter in self._waiters:
            if not waiter.answer.done():
                waiter.answer.set_exception(error)
        self._waiters.clear()
        self._by_round.clear()
