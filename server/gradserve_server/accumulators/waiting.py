"""The queue of calls that wait for the end of a round, first in, first out."""

import asyncio
from collections import OrderedDict

from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Round


class Waiter:
    """A take or push_pull that waits for an average.

    Attributes:
        num_required: The number of gradients it needs.
        round: The round of a push_pull, which is served whenever this round ends; None for a take.
        call: The id of the first call that waits for it, if it has one.
        answer: A future of the average, or of the error that ended the wait; cancelled when the last call that waited
            for it gave up.
        listeners: The number of calls that wait for the answer; a retry joins the first call here.
        serving: Whether its average is being computed, so that it will be served.
    """

    def __init__(self, num_required: int, *, call: RequestId | None = None) -> None:
        self.num_required = num_required
        self.call = call
        self.round: Round | None = None
        self.answer: asyncio.Future[Average] = asyncio.get_running_loop().create_future()
        self.listeners = 0
        self.serving = False

    def fail(self, error: Exception) -> None:
        """Answers with an error, unless there is an answer already."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # retrieved here, because everybody may have left


class TakeQueue:
    """A strict queue: its head holds up all behind it, however few gradients they need."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._by_round: dict[Round, dict[Waiter, None]] = {}
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_required(self) -> int:
        """The number of gradients that the first waiter needs; 0 if nobody waits."""
        first = next(iter(self._waiters), None)
        return 0 if first is None else first.num_required

    def append(self, waiter: Waiter) -> None:
        """Appends a waiter; answers it with the error of `close`, once that was called."""
        if self._closed is not None:
            waiter.fail(self._closed)
            return
        self._waiters[waiter] = None
        if waiter.round is not None:
            self._by_round.setdefault(waiter.round, {})[waiter] = None

    def head(self, num_accumulated: int) -> Waiter | None:
        """Returns the first waiter if `num_accumulated` gradients are enough for it."""
        first = next(iter(self._waiters), None)
        return first if first is not None and num_accumulated >= first.num_required else None

    def remove(self, waiter: Waiter) -> None:
        """Removes a waiter, wherever it is; ignores one that is not in the queue."""
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

    def close(self, error: Exception) -> None:
        """Answers all waiters with an error, and those who come later: a gradient may be on its way to the sum."""
        self._closed = error
        for waiter in self._waiters:
            waiter.fail(error)
        self._waiters.clear()
        self._by_round.clear()
