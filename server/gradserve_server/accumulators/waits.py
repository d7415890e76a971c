"""Calls that wait for rounds: their queue, their timeouts with an explanation, and the workers known to be alive."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from gradserve_protocol.printing import visible
from gradserve_server.accumulators.averages import AverageHistory
from gradserve_server.accumulators.gradient import Average, Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import (
    OF_ACCUMULATORS,
    AccumulatorObserver,
    ClosingRule,
    Members,
    Round,
    Rounds,
    Wording,
)
from gradserve_server.errors import DeadlineExceededError, InvalidArgumentError


class Waiter:
    """A take or push_pull that waits for an average.

    Attributes:
        closing: The rule by which it ends a round.
        round: The round of a push_pull, whose end always answers it; None for a take.
        call: The id of the first call that waits here, if it has one.
        answer: A future of the average, of None if the round was dropped, or of the error that ended the wait;
            cancelled when the last waiting call gives up.
        listeners: The number of calls that wait for the answer; a retry joins the first call here.
        serving: Whether its average is being computed, so that an answer is certain.
    """

    def __init__(self, closing: ClosingRule, *, call: RequestId | None = None) -> None:
        self.closing = closing
        self.call = call
        self.round: Round | None = None
        self.answer: asyncio.Future[Average | None] = asyncio.get_running_loop().create_future()
        self.listeners = 0
        self.serving = False

    def fail(self, error: Exception) -> None:
        """Answers with an error, unless already answered."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # marks it as retrieved: every listener may have left


class TakeQueue:
    """The waiting calls, first in, first out: the head blocks all behind it, however few gradients they need."""

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
        return 0 if first is None else first.closing.num_required

    def append(self, waiter: Waiter) -> None:
        """Appends a waiter; after `close`, fails it with the error instead."""
        if self._closed is not None:
            waiter.fail(self._closed)
            return
        self._waiters[waiter] = None
        if waiter.round is not None:
            self._by_round.setdefault(waiter.round, {})[waiter] = None

    def head(self, members: Members) -> Waiter | None:
        """Returns the first waiter if a round with these members can end for it."""
        first = next(iter(self._waiters), None)
        return first if first is not None and first.closing.is_met(members) else None

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
        self._answer([head, *self._by_round.get(closed, ())], average)

    def drop(self, dropped: Round) -> None:
        """Answers every push_pull of a round that was dropped."""
        self._answer([*self._by_round.get(dropped, ())], None)

    def _answer(self, waiters: Iterable[Waiter], average: Average | None) -> None:
        for waiter in waiters:
            self.remove(waiter)
            if not waiter.answer.done():
                waiter.answer.set_result(average)

    def fail_pulls(self, error: Exception) -> None:
        """Fails all waiting push_pulls but those whose average is being computed; their gradients stay in the round."""
        for waiter in [each for peers in self._by_round.values() for each in peers if not each.serving]:
            self.remove(waiter)
            waiter.fail(error)

    def close(self, error: Exception) -> None:
        """Fails all waiters, and later ones too: a gradient may still be on its way to the sum."""
        self._closed = error
        for waiter in self._waiters:
            waiter.fail(error)
        self._waiters.clear()
        self._by_round.clear()


_MOST_NAMED = 64
_MOST_CHARACTERS = 800
"""The most characters of a list of workers: a gRPC status has room for two such lists."""


class Diagnosis:
    """Explains why a wait timed out, by the state of the current round.

    Many waits often end together, so the text about the workers is built once for each state of the round.
    """

    def __init__(self, name: str, rounds: Rounds, queue: TakeQueue, wording: Wording = OF_ACCUMULATORS) -> None:
        self._name = name
        self._wording = wording
        self._rounds = rounds
        self._queue = queue
        self._described: tuple[int, int] | None = None
        self._workers = ""

    def too_few(self, num_required: int, timeout: float | None) -> DeadlineExceededError:
        """Returns the error for a call that did not get the gradients that it required within `timeout` seconds."""
        return DeadlineExceededError(
            f"{self._wording.kind} {self._name!r} did not get the {num_required} {self._wording.item}s required within "
            f"{timeout:g} s: {self.text()}",
            code="GS_ROUND_INCOMPLETE",
        )

    def no_average(self, step: int | None, timeout: float | None) -> DeadlineExceededError:
        """Returns the error for a call that did not get the average of a step within `timeout` seconds."""
        kind, result = self._wording.kind, self._wording.result
        wanted = f"any {result}" if step is None else f"the {result} of step {step}"
        return DeadlineExceededError(
            f"{wanted} of {kind} {self._name!r} did not arrive within {timeout:g} s: {self.text()}",
            code="GS_ROUND_INCOMPLETE",
        )

    def text(self) -> str:
        """Returns a sentence about the gradients in the round and the missing workers."""
        rounds = self._rounds
        described = (rounds.current.number, rounds.num_accumulated)
        if described != self._described:
            self._described, self._workers = described, self._describe_workers()
        count = rounds.num_accumulated
        return (
            f"{count} {self._wording.item}{' is' if count == 1 else 's are'} in ({self._workers}), "
            f"global_step is {rounds.global_step}, {len(self._queue)} wait"
        )

    def _describe_workers(self) -> str:
        rounds = self._rounds
        present = _named(rounds.members.workers, len(rounds.members.workers)) or "none named"
        missing = _named(rounds.missing_workers, len(rounds.missing_workers))
        if not rounds.all_workers_known:
            missing = f"{missing}, others unknown" if missing else "unknown"
        return f"workers: {present}; missing from the previous round: {missing or 'none'}"


def _named(workers: Iterable[str], count: int) -> str:
    """Returns the first workers, separated by commas, and the number of the rest."""
    named: list[str] = []
    room = _MOST_CHARACTERS
    for worker in map(visible, workers):
        room -= len(worker) + 2
        if len(named) == _MOST_NAMED or room < 0:
            return f"{', '.join(named)} and {count - len(named)} more"
        named.append(worker)
    return ", ".join(named)


_GRACE_SECONDS = 1.0
"""The time within which the server notices that the connection of a dead client has ended."""


@dataclass(eq=False)
class _Pulling:
    """The push_pulls of one client with one worker_id.

    Attributes:
        client: The client.
        num_calls: The number of its calls in flight.
        over: Resolved when the last of them ends, with True if its caller left; None if nobody asked.
    """

    client: str
    num_calls: int = 0
    over: asyncio.Future[bool] | None = None


class LiveWorkers:
    """The clients with push_pulls in flight on one accumulator, by worker_id.

    A waiting call proves that its client is alive. So a second client with the same worker_id is not the same worker
    after a restart but another one, whose gradients would be dropped. Calls without a request id do not identify their
    clients.
    """

    def __init__(self, name: str, wording: Wording = OF_ACCUMULATORS) -> None:
        self._name = name
        self._wording = wording
        self._pulling: dict[str, _Pulling] = {}

    def pulling(self, call: RequestId | None, contribution: Contribution) -> AbstractContextManager[None]:
        """Records for the duration of a block that the client of a push_pull is alive."""
        if call is None or (not contribution.sum_of and not contribution.worker_id):
            return _Noted(self._pulling, ())
        if not contribution.sum_of:
            return _Noted(self._pulling, ((contribution.worker_id, call.owner),))
        named = [(each.worker_id, each.call.owner) for each in contribution.sum_of if each.worker_id and each.call]
        return _Noted(self._pulling, named)

    async def check(self, call: RequestId | None, contribution: Contribution, timeout: float | None) -> None:
        """Checks that no other live client is waiting with the worker_id of a gradient that counts once per worker.

        If one is waiting, gives it a moment to leave, at most `timeout` seconds: when a worker is killed and restarted,
        its new connection may arrive before the old one ends. Sums are not checked: one with a worker that is already
        in the round is refused, and its gradients are sent one by one.

        Raises:
            InvalidArgumentError: Another client is waiting, and it is alive.
        """
        worker_id = contribution.worker_id
        while call is not None and worker_id and not contribution.sum_of:
            other = self._pulling.get(worker_id)
            if other is None or other.client == call.owner:
                return
            if other.over is None:
                other.over = asyncio.get_running_loop().create_future()
            has_left = False
            try:
                async with asyncio.timeout(_GRACE_SECONDS if timeout is None else min(timeout, _GRACE_SECONDS)):
                    has_left = await asyncio.shield(other.over)
            except TimeoutError:
                pass
            if not has_left:
                raise InvalidArgumentError(
                    f"two clients use worker_id {worker_id!r} at once: {self._wording.kind} {self._name!r} counts each "
                    "worker once a round, and another client is waiting there with this id; expected a worker_id that "
                    "no other running worker has",
                    field="worker_id",
                )


class _Noted(AbstractContextManager[None]):
    """Workers whose push_pulls are under way."""

    __slots__ = ("_all", "_named", "_noted")

    def __init__(self, pulling: dict[str, _Pulling], named: Sequence[tuple[str, str]]) -> None:
        self._all = pulling
        self._named = named
        self._noted: list[tuple[str, _Pulling]] = []

    def __enter__(self) -> None:
        for worker_id, client in self._named:
            known = self._all.setdefault(worker_id, _Pulling(client))
            if known.client == client:
                known.num_calls += 1
                self._noted.append((worker_id, known))

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for worker_id, known in self._noted:
            known.num_calls -= 1
            if not known.num_calls:
                del self._all[worker_id]
                if known.over is not None:
                    known.over.set_result(kind is not None and issubclass(kind, asyncio.CancelledError))


class Waits:
    """Lets calls wait for averages of one accumulator, up to their timeouts."""

    def __init__(
        self,
        name: str,
        rounds: Rounds,
        queue: TakeQueue,
        observer: AccumulatorObserver,
        gave_up: Callable[[Waiter], object],
        wording: Wording = OF_ACCUMULATORS,
    ) -> None:
        """Takes the parts of the accumulator.

        Args:
            name: Its name, for messages.
            rounds: Its rounds.
            queue: The calls that wait for a round to end.
            observer: Notified of waits.
            gave_up: Called when a waiter leaves the queue unanswered.
            wording: What messages call it.
        """
        self._gave_up = gave_up
        self._rounds = rounds
        self._queue = queue
        self._diagnosis = Diagnosis(name, rounds, queue, wording)
        self._observer = observer

    async def until_answered(self, waiter: Waiter, timeout: float | None) -> Average | None:
        """Waits until a waiter is answered, for at most `timeout` seconds; None for no limit.

        Returns:
            The average; None for a push_pull whose round was dropped.

        Raises:
            DeadlineExceededError: It was not answered in time, and has left the queue.
        """
        if waiter.answer.done():
            return waiter.answer.result()
        waiter.listeners += 1
        try:
            with self._observer.waiting() as wait:
                async with asyncio.timeout(timeout):
                    average = await asyncio.shield(waiter.answer)
                if average is not None:
                    wait.served(average.step)
                return average
        except TimeoutError:
            if waiter.serving or waiter.answer.done():
                # Its round is ending or has just ended: giving up now would lose the average.
                return await asyncio.shield(waiter.answer)
            raise self._diagnosis.too_few(waiter.closing.num_required, timeout) from None
        finally:
            waiter.listeners -= 1
            self.leave(waiter)

    async def until_read(self, history: AverageHistory, step: int | None, timeout: float | None) -> Average:
        """Waits for the average of a step, or the newest for None, for at most `timeout` seconds.

        Raises:
            OutOfRangeError: The average is not kept, or no round will lead to the step.
            DeadlineExceededError: No round led to the step in time.
        """
        try:
            with self._observer.waiting() as wait:
                async with asyncio.timeout(timeout):
                    average = await history.read(step, self._rounds.global_step)
                wait.served(average.step)
                return average
        except TimeoutError:
            raise self._diagnosis.no_average(step, timeout) from None

    def leave(self, waiter: Waiter) -> None:
        """Removes a waiter from the queue once all its callers have left, unless its answer is certain."""
        if waiter.listeners == 0 and not waiter.serving and not waiter.answer.done():
            waiter.answer.cancel()
            self._queue.remove(waiter)
            self._gave_up(waiter)
