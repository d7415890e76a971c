"""Operations that run together, in the thread that waits for them."""

import heapq
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from gradserve.calls.exchange import Allocate, Background, CleanUp, DescribeTransport, Local, Operation, Pause, Track
from gradserve.calls.retries import Attempt, Attempts
from gradserve.transport.blocking.sockets import Watch
from gradserve.transport.blocking.threaded_call import ThreadedCall
from gradserve.transport.schedule import Member, Schedule

Outcome = Callable[[], Any]
"""A function that returns the answer to a step, or raises its error."""


class Calls(Protocol):
    """Makes calls."""

    def carry(self, attempt: Attempt, watch: Watch | None, /) -> Any:
        """Makes a call in this thread; `watch` is told what interrupts it from another thread."""
        ...

    def answer(self, step: Local, /) -> Any:
        """Answers what needs no server."""
        ...

    def begin(self, begin: Callable[[], Operation[None]], /) -> None:
        """Runs an operation in the background."""
        ...


class ConcurrentSteps:
    """Carries out steps of several operations at the same time, each call in a thread.

    The operations themselves run in the caller's thread only. So their default worker id is the caller's.
    """

    def __init__(self, calls: Calls, attempts: Callable[[Operation[Any]], Attempts[Any]]) -> None:
        self._calls = calls
        self._attempts = attempts
        self._ended: queue.SimpleQueue[tuple[Member, Outcome]] = queue.SimpleQueue()
        self._under_way: dict[Member, Any] = {}
        self._pauses: list[tuple[float, int, Member]] = []
        self._numbers = itertools.count()
        self._calls_made: list[ThreadedCall] = []

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Returns the results of operations, or raises the first error when all have ended."""
        schedule = Schedule(operations, self._attempts, self)
        try:
            while not schedule.is_over:
                member, outcome = self._next()
                if self._under_way.pop(member, None) is None:
                    continue  # it was cancelled
                try:
                    answer = outcome()
                except BaseException as error:
                    schedule.fail(member, error)
                else:
                    schedule.answer(member, answer)
        finally:
            schedule.close()
            for each in self._calls_made:
                each.join()
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        self._under_way[member] = step
        match step:
            case Pause(seconds):
                heapq.heappush(self._pauses, (time.monotonic() + seconds, next(self._numbers), member))
            case Background(begin):
                self._ended.put((member, lambda: self._calls.begin(begin)))
            case DescribeTransport() | Allocate() | Track() | CleanUp():
                self._ended.put((member, lambda: self._calls.answer(step)))
            case Attempt():
                call = ThreadedCall(partial(self._calls.carry, step))
                self._under_way[member] = call
                self._calls_made.append(call)
                call.start(lambda: self._ended.put((member, call.result)))

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        call = self._under_way.pop(member)
        if isinstance(call, ThreadedCall):
            call.cancel()

    def _next(self) -> tuple[Member, Outcome]:
        """Waits until a call or a pause has ended."""
        while self._pauses:
            end, _, member = self._pauses[0]
            try:
                return self._ended.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                heapq.heappop(self._pauses)
                if member in self._under_way:
                    return member, _nothing
        return self._ended.get()


def _nothing() -> None:
    """Answers a pause."""
