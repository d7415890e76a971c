"""Batches of gradients that an aggregator forwards as one sum, its counts, and the gradient of each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from gradserve_server.accumulators.gradient import Array, Contribution, Gradient
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.sums.packed import unpacked, unpacked_bytes
from gradserve_server.errors import AbortedError, ServiceError
from gradserve_server.runtime.event_loop import retrieve

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class _Loan(NamedTuple):
    """A gradient as one caller has brought it, and a future of its return."""

    gradient: Gradient
    returned: asyncio.Future[None]


class Leaf(Generic[RequestT, AnswerT]):
    """A gradient that somebody upstream answers, alone or with others.

    Its caller may go, and call again: then the gradient is read where the latest call has it, and that call gets the
    answer, too.

    Used on the event loop only.

    Attributes:
        request: The request, without its tensors.
        contribution: The sender, step and weight of the gradient.
        deadline: The time of the event loop at which the last caller stops waiting; None for never.
        answer: A future of the answer.
    """

    def __init__(self, request: RequestT, contribution: Contribution) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.contribution = contribution
        self.deadline: float | None = loop.time()
        self.answer: asyncio.Future[AnswerT] = loop.create_future()
        self.answer.add_done_callback(retrieve)
        self._loans: list[_Loan] = []
        self._lent = asyncio.Event()
        self._num_bringing = 0
        self._num_reading = 0
        self._was_heard = False
        self._listeners = 0
        self._is_added_up = False

    # For its callers

    async def wait(self, timeout: float | None) -> AnswerT:
        """Waits for the answer.

        Raises:
            TimeoutError: There was none within `timeout` seconds.
            ServiceError: It is an error.
        """
        if timeout is None or self.deadline is None:
            self.deadline = None
        else:
            self.deadline = max(self.deadline, asyncio.get_running_loop().time() + timeout)
        self._was_heard = True
        self._listeners += 1
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self.answer)
        finally:
            self._listeners -= 1
            self._return_loans()

    def bring(self) -> None:
        """Notes that a caller is about to lend the gradient; `brought` must follow."""
        self._num_bringing += 1

    def brought(self) -> None:
        """Notes that the caller has lent the gradient, or has failed to."""
        self._num_bringing -= 1
        self._lent.set()

    def lend(self, gradient: Gradient) -> asyncio.Future[None]:
        """Lends the gradient in place of what earlier calls have lent; returns a future of its return.

        The future has the error of the call if it has failed: whatever the call was to release is kept.
        """
        loan = _Loan(gradient, asyncio.get_running_loop().create_future())
        self._loans.append(loan)
        self._lent.set()
        self._return_loans()
        return loan.returned

    # For who passes it on

    @property
    def gradient(self) -> Gradient | None:
        """The gradient, while somebody lends it."""
        return self._loans[-1].gradient if self._loans else None

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Gradient]:
        """Gives the gradient to a block, which may read it; waits for a caller that is bringing it again.

        Raises:
            AbortedError: All callers have gone.
        """
        while not self._loans:
            if not self._num_bringing:
                raise AbortedError("the caller left before its gradient was forwarded")
            self._lent.clear()
            await self._lent.wait()
        self._num_reading += 1
        try:
            yield self._loans[-1].gradient
        finally:
            self._num_reading -= 1
            self._return_loans()

    def added_up(self) -> None:
        """Notes that the gradient is in a sum: it is needed only as long as its caller may have to send it alone."""
        self._is_added_up = True
        self._return_loans()

    def succeed(self, answer: AnswerT) -> None:
        """Answers."""
        if not self.answer.done():
            self.answer.set_result(answer)
        self._return_loans()

    def fail(self, error: Exception) -> None:
        """Answers with an error, unless there is an answer already."""
        if not self.answer.done():
            self.answer.set_exception(error)
        self._return_loans()

    @property
    def is_left(self) -> bool:
        """True once nobody waits for the answer any more."""
        return self._was_heard and not self._listeners

    def _return_loans(self) -> None:
        """Returns the gradients that are not needed any more; those that somebody reads, later."""
        if self._num_reading:
            return
        is_over = self.answer.done() or (self._is_added_up and self.is_left)
        returned = self._loans if is_over else self._loans[:-1]
        self._loans = self._loans[len(returned) :]
        for _, future in returned:
            error = self.answer.exception() if self.answer.done() else None
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


_MOST_IDLE = 16
"""Keys without waiting gradients whose counts are still kept."""
LeafT = TypeVar("LeafT")


@dataclass(frozen=True)
class ForwardingRule:
    """The rule for forwarding a batch of gradients.

    Attributes:
        num_gradients: The number of gradients in a full batch.
        grace: The most seconds that the first of them waits for others.
    """

    num_gradients: int
    grace: float


@dataclass(eq=False)
class _Batch(Generic[LeafT]):
    """The waiting gradients of one key.

    Attributes:
        count: The gradients of this key since its last full batch.
        leaves: The gradients that wait.
        timer: Forwards them when the grace is over; None if none waits.
    """

    count: int = 0
    leaves: list[LeafT] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Batches(Generic[LeafT]):
    """Collects gradients that can be added up, by a key. Used on the event loop only.

    A gradient that arrives after the others were forwarded without it does not wait for a whole batch again: it
    completes the earlier one.
    """

    def __init__(self, rule: ForwardingRule, forward: Callable[[list[LeafT]], object]) -> None:
        self._rule = rule
        self._forward = forward
        self._batches: dict[Hashable, _Batch[LeafT]] = {}
        self._closed: ServiceError | None = None

    @property
    def num_waiting(self) -> int:
        """The calls whose gradients wait for others."""
        return sum([len(each.leaves) for each in self._batches.values()])

    def add(self, key: Hashable, leaf: LeafT, count: int) -> None:
        """Adds a gradient that stands for `count`.

        Raises:
            ServiceError: The error of `close`, once that was called.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        batch = self._batches.setdefault(key, _Batch())
        batch.count += count
        batch.leaves.append(leaf)
        if batch.count >= self._rule.num_gradients:
            del self._batches[key]
            self._flush(batch)
        elif batch.timer is None:
            batch.timer = asyncio.get_running_loop().call_later(self._rule.grace, self._flush_late, batch)

    def close(self, error: ServiceError | None = None) -> list[LeafT]:
        """Removes and returns the waiting gradients.

        Args:
            error: The error for later gradients; None if none can come.
        """
        self._closed = error
        waiting = [leaf for each in self._batches.values() for leaf in each.leaves]
        for each in self._batches.values():
            if each.timer is not None:
                each.timer.cancel()
        self._batches.clear()
        return waiting

    def _flush(self, batch: _Batch[LeafT]) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        leaves, batch.leaves, batch.timer = batch.leaves, [], None
        self._forward(leaves)

    def _flush_late(self, batch: _Batch[LeafT]) -> None:
        self._flush(batch)
        idle = [key for key, each in self._batches.items() if not each.leaves]
        for key in idle[:-_MOST_IDLE]:
            del self._batches[key]


@dataclass
class Counts:
    """Numbers since the start of the server, for metrics.

    Attributes:
        gradients: Gradients received for accumulators upstream, and updates of parameters.
        sums: Forwarded sums of several.
        alone: Those that were forwarded alone.
        downloads: Averages and versions read upstream for readers here.
        reads: Averages and versions returned to readers here.
    """

    gradients: int = 0
    sums: int = 0
    alone: int = 0
    downloads: int = 0
    reads: int = 0


def in_order(contributions: Sequence[Contribution]) -> list[int]:
    """Returns the order in which gradients are added: that of (worker_id, sequence), so that the bits repeat."""
    return sorted(range(len(contributions)), key=lambda at: (contributions[at].worker_id, contributions[at].sequence))


def sum_bytes(spec: AccumulatorSpec, gradients: Sequence[Gradient]) -> int:
    """Returns the memory that `summed` takes: that of the sum, and of one gradient if some are packed."""
    dtypes, first = spec.dense_sum_dtypes, gradients[0]
    total = sum([value.size * dtypes[name].itemsize for name, value in first.dense.items()])
    total += unpacked_bytes(first.packed, dtypes)
    return total + max([unpacked_bytes(each.packed, dtypes) for each in gradients])


def summed(
    spec: AccumulatorSpec, place: Place, gradients: Sequence[tuple[Contribution, Gradient]]
) -> Mapping[str, Array]:
    """Returns the sum of checked dense gradients, each times its factor, in the dtypes of the accumulator's sums.

    Each addition is rounded as in the accumulator itself.

    Args:
        spec: The accumulator's spec.
        place: Computes.
        gradients: The gradients, in the order in which they are added, with what they contribute; at least one. All
            have the same components.

    Raises:
        MemoryError: There is not enough memory.
    """
    dtypes = spec.dense_sum_dtypes
    totals: dict[str, Array] = {}
    for contribution, gradient in gradients:
        # One at a time, so that only one is unpacked.
        values: dict[str, Any] = dict((unpacked(gradient, dtypes, place) if gradient.packed else gradient).values)
        if not totals:
            totals = {name: place.allocate(value.shape, dtypes[name]) for name, value in values.items()}
            place.reducer.scale(list(values.values()), contribution.factor, list(totals.values()))
        else:
            in_order = [values[name] for name in totals]
            place.reducer.add_scaled(list(totals.values()), in_order, contribution.factor)
    return totals
