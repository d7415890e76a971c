"""Operations that run together, in the thread that waits for them."""

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradserve.calls.exchange import Background, Download, Operation, Pause
from gradserve.calls.retries import Attempt, Attempts
from gradserve.transport.schedule import Member, Schedule

Outcome = Callable[[], Any]
"""A function that returns the answer to a step, or raises its error."""


class Calls(Protocol):
    """Makes calls that the thread does not wait for."""

    def start(self, attempt: Attempt, /) -> Any:
        """Starts a call; returns gRPC's object for it, which is a future for a unary call or an upload."""
        ...

    def read(self, call: Any, /) -> Any:
        """Returns the arrays of a download."""
        ...

    def answer(self, attempt: Attempt, outcome: Outcome, /) -> Any:
        """Returns the answer to an attempt; raises gRPC's errors as gradserve's."""
        ...

    def begin(self, operation: Operation[None], /) -> None:
        """Runs an operation in the background."""
        ...


class ConcurrentSteps:
    """Carries out steps of several operations at the same time; the operations run in the caller's thread only.

    So their default worker id is the caller's.
    """

    def __init__(self, calls: Calls, attempts: Callable[[Operation[Any]], Attempts[Any]]) -> None:
        self._calls = calls
        self._attempts = attempts
        self._ended: queue.SimpleQueue[tuple[Member, Outcome]] = queue.SimpleQueue()
        self._under_way: dict[Member, Any] = {}
        self._pauses: list[tuple[float, int, Member]] = []
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

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
            for each in self._threads:
                each.join()
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background, /) -> None:
        """Begins a step."""
        self._under_way[member] = step
        match step:
            case Pause(seconds):
                heapq.heappush(self._pauses, (time.monotonic() + seconds, next(self._numbers), member))
            case Background(begin):
                self._ended.put((member, lambda: self._calls.begin(begin())))
            case Attempt():
                self._start(member, step)

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        call = self._under_way.pop(member)
        if not isinstance(call, Pause | Background | Attempt):
            call.cancel()

    def _start(self, member: Member, attempt: Attempt) -> None:
        try:
            call = self._calls.start(attempt)
        except Exception as error:
            self._report(member, attempt, _raising(error))
            return
        self._under_way[member] = call
        if isinstance(attempt.exchange, Download):
            self._threads.append(threading.Thread(target=self._download, args=(member, attempt, call)))
            self._threads[-1].start()
        else:
            call.add_done_callback(lambda ended: self._report(member, attempt, ended.result))

    def _download(self, member: Member, attempt: Attempt, call: Any) -> None:
        try:
            arrays = self._calls.read(call)
        except Exception as error:
            self._report(member, attempt, _raising(error))
        else:
            self._report(member, attempt, lambda: arrays)

    def _report(self, member: Member, attempt: Attempt, outcome: Outcome) -> None:
        self._ended.put((member, lambda: self._calls.answer(attempt, outcome)))

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


def _raising(error: Exception) -> Outcome:
    def outcome() -> Any:
        raise error

    return outcome
