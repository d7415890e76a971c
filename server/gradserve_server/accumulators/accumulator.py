"""One accumulator: who calls, in what order, and what each is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from gradserve_server.accumulators.checking import checked_gradient, checking_work
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient
from gradserve_server.accumulators.history import AverageHistory
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.results import AccumulatorState, Applied, Outcome
from gradserve_server.accumulators.rounds import Round, Rounds
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.summation import Shapes, Summation, value_shapes
from gradserve_server.accumulators.undelivered import UndeliveredAverages
from gradserve_server.accumulators.waiting import TakeQueue, Waiter
from gradserve_server.devices.compute import Compute
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
)
from gradserve_server.tensors.quotas import Account, Quota

P = ParamSpec("P")
T = TypeVar("T")

OpenGradient = Callable[[], AbstractContextManager[Gradient]]
"""Fetches the gradient of a call. The context is left without an exception when it was accepted or dropped."""


@dataclass
class _Take:
    """What is remembered of a take: who waits, later only which round it got."""

    waiter: Waiter | None
    step: int = 0
    round_number: int = 0


CallRecord = asyncio.Task[Applied] | Applied | _Take
"""What is remembered of a call: what its gradient becomes or became, or its take."""


class Accumulator:
    """Averages gradients in rounds. For the semantics see `AccumulatorService` in the protos.

    Lives on one event loop. Whatever changes the round holds a lock, in order of arrival, also while threads do
    the arithmetic; a change that has begun is finished even if its caller goes away. Waiting takes no thread.
    """

    def __init__(
        self,
        name: str,
        spec: AccumulatorSpec,
        *,
        incarnation: str,
        summation: Summation,
        compute: Compute,
        memory: Quota,
        waiters: Quota,
        calls: CallMemory[CallRecord],
        undelivered: UndeliveredAverages,
        expire_at: Callable[[float, "Accumulator"], None],
    ) -> None:
        """Takes the quotas that it shares with others.

        Args:
            name: For messages.
            spec: What it is.
            incarnation: Tells it from others of the same name.
            summation: Adds up.
            compute: Runs the arithmetic.
            memory: Bytes.
            waiters: Calls that wait.
            calls: Remembers request ids.
            undelivered: Keeps averages whose replies may be lost.
            expire_at: Asks for a call of `expire` at a time of the clock of `undelivered`.
        """
        self.name = name
        self.spec = spec
        self.incarnation = incarnation
        self._summation = summation
        self._compute = compute
        self._account = Account(memory)
        self._undelivered_account = Account(memory)
        self._waiter_quota = waiters
        self._calls = calls
        self._undelivered = undelivered
        self._expire_at = expire_at
        self._expiry_asked_for = False
        self._rounds = Rounds()
        self._round_shapes: Shapes | None = None
        self._queue = TakeQueue()
        self._history = AverageHistory(spec.keep_averages)
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed: ServiceError | None = None

    @property
    def num_accumulated(self) -> int:
        """Gradients accepted since the last take."""
        return self._rounds.num_accumulated

    @property
    def state(self) -> AccumulatorState:
        """The accumulator as it is now."""
        return AccumulatorState(
            global_step=self._rounds.global_step,
            num_accumulated=self._rounds.num_accumulated,
            num_waiting=len(self._queue),
            num_bytes=self._account.used + self._undelivered_account.used,
            worker_ids=self._rounds.current.worker_ids,
            kept_steps=self._history.steps,
        )

    async def apply(
        self, call: RequestId | None, contribution: Contribution, open_gradient: OpenGradient
    ) -> tuple[Applied, bool]:
        """Adds a gradient to the round or drops it as stale; tells whether the call was a duplicate.

        Raises:
            InvalidArgumentError: The gradient does not fit; nothing has changed.
            ServiceError: `open_gradient` failed, or a limit was reached; nothing has changed.
        """
        return await self._apply_once(call, contribution, open_gradient, pull=None, one_per_worker=False)

    async def take(self, call: RequestId | None, num_required: int, timeout: float | None) -> tuple[Average, bool]:
        """Waits until enough gradients are in, ends the round; tells whether the call was a duplicate.

        Raises:
            InvalidArgumentError: `num_required` is not positive.
            DeadlineExceededError: Not enough of them within `timeout` seconds; nothing has changed.
            AbortedError: The average of an earlier call is gone, or the accumulator was deleted.
        """
        _check_num_required(num_required)
        known = self._recall(call)
        self._check_open()
        with self._waiter_quota.hold():
            if known is not None:
                assert isinstance(known, _Take), "another kind of call has another fingerprint"
                if known.waiter is None:
                    return self._kept(known.step, known.round_number), True
                return await self._await_take(call, known, known.waiter, timeout), True
            waiter = Waiter(num_required, call=call)
            record = _Take(waiter)
            waiter.answer.add_done_callback(partial(self._end_take, call, record))
            self._calls.remember(call, record)
            self._queue.append(waiter)
            self._wake()
            return await self._await_take(call, record, waiter, timeout), False

    async def push_pull(
        self,
        call: RequestId | None,
        contribution: Contribution,
        open_gradient: OpenGradient,
        num_required: int,
        timeout: float | None,
        *,
        one_per_worker: bool = True,
    ) -> tuple[Applied, Average | None, bool]:
        """Applies a gradient and waits for the average of its round.

        Args:
            call: Its id, if it has one.
            contribution: Who sends it, and what it counts.
            open_gradient: Fetches it.
            num_required: How many gradients end the round.
            timeout: Seconds to wait; None for ever.
            one_per_worker: Count only the first gradient of each worker in a round. Those that come later are dropped,
                and wait for the average of the round that the first is in.

        Returns:
            What became of the gradient; the average of its round, or if it was stale the newest one, if any; and
            whether the call was a duplicate.

        Raises:
            ServiceError: As `apply` and `take` do. The gradient stays in the round when the wait fails.
        """
        _check_num_required(num_required)
        with self._waiter_quota.hold():
            waiter = Waiter(num_required, call=call)
            try:
                applied, duplicate = await self._apply_once(
                    call, contribution, open_gradient, pull=waiter, one_per_worker=one_per_worker
                )
                if applied.round is None:
                    return applied, self._history.newest(), duplicate
                if duplicate:
                    if applied.round.step is not None:
                        return applied, self._kept(applied.round.step, applied.round.number), duplicate
                    self._check_open()
                    waiter.round = applied.round
                    self._queue.append(waiter)
                    self._wake()
                return applied, await self._wait(waiter, timeout), duplicate
            finally:
                self._leave(waiter)

    async def read_average(self, step: int | None, timeout: float | None) -> Average:
        """Waits for the average of the round that leads to `step`; None for the newest.

        Raises:
            OutOfRangeError: It is not kept, or no round led to that step.
            DeadlineExceededError: No round led there within `timeout` seconds.
        """
        self._check_open()
        try:
            with self._waiter_quota.hold():
                async with asyncio.timeout(timeout):
                    return await self._history.read(step, self._rounds.global_step)
        except TimeoutError:
            wanted = "any average" if step is None else f"the average of step {step}"
            raise DeadlineExceededError(
                f"{wanted} of accumulator {self.name!r} did not come within {timeout:g} s: {self._diagnosis()}"
            ) from None

    async def set_global_step(self, step: int) -> None:
        """Sets the step; gradients in the round stay."""
        await asyncio.shield(self._own(self._set_global_step(step)))

    async def _set_global_step(self, step: int) -> None:
        async with self._exclusive():
            self._rounds.set_global_step(step)
            self._history.step_set(step)

    def close(self, error: ServiceError) -> None:
        """Ends every wait with `error`, refuses what comes later, and gives back the memory."""
        self._closed = error
        self._queue.fail_all(error)
        self._history.fail_all(error)
        self._undelivered.clear()
        self._account.settle(0)
        self._undelivered_account.settle(0)

    async def _apply_once(
        self,
        call: RequestId | None,
        contribution: Contribution,
        open_gradient: OpenGradient,
        pull: Waiter | None,
        one_per_worker: bool,
    ) -> tuple[Applied, bool]:
        if not (0 < contribution.weight < float("inf")):
            raise InvalidArgumentError(
                f"expected a positive, finite weight, got {contribution.weight:g}", field="weight"
            )
        if self.spec.deterministic and not contribution.worker_id:
            raise InvalidArgumentError(
                f"expected a worker_id, as accumulator {self.name!r} is deterministic; got an empty one",
                field="worker_id",
            )
        known = self._recall(call)
        if known is not None:
            assert not isinstance(known, _Take), "another kind of call has another fingerprint"
            applied = known if isinstance(known, Applied) else await asyncio.shield(known)
            # What a repeated call brought along goes the way of what the first one did, unless it is the same.
            with contextlib.suppress(ServiceError), open_gradient():
                pass
            return applied, True
        once = one_per_worker or self.spec.one_per_worker
        task = self._own(self._apply(contribution, open_gradient, pull, one_per_worker=once))
        self._calls.remember(call, task)
        task.add_done_callback(partial(self._end_apply, call))
        return await asyncio.shield(task), False

    async def _apply(
        self, contribution: Contribution, open_gradient: OpenGradient, pull: Waiter | None, *, one_per_worker: bool
    ) -> Applied:
        with open_gradient() as given:
            async with self._exclusive():
                stale = self._rounds.is_stale(contribution)
                shapes = None if stale else self._round_shapes
                gradient = await self._run(checking_work(self.spec, given), checked_gradient, self.spec, given, shapes)
                if stale:
                    return self._applied(Outcome.STALE, None)
                outcome, joined = Outcome.ALREADY_COUNTED, self._rounds.current
                if not (one_per_worker and joined.has_worker(contribution.worker_id)):
                    await self._add(gradient, contribution)
                    outcome, joined = Outcome.ACCEPTED, self._rounds.admit(contribution)
                if pull is not None:
                    # Also for one that gave up waiting: it may come again for the average.
                    self._undelivered.expect(pull.call)
                    if not pull.answer.cancelled():
                        pull.round = joined
                        self._queue.append(pull)
                return self._applied(outcome, joined)

    def _applied(self, outcome: Outcome, joined: Round | None) -> Applied:
        return Applied(outcome, joined, self._rounds.global_step, self._rounds.num_accumulated)

    async def _add(self, gradient: Gradient, contribution: Contribution) -> None:
        self._reserve(self._summation.growth(gradient))
        try:
            await self._run(gradient.work, self._summation.add, gradient, contribution)
        finally:
            self._settle()
        if self._round_shapes is None:
            self._round_shapes = value_shapes(gradient)

    def _reserve(self, num_bytes: int) -> None:
        """Takes memory, if need be at the cost of averages kept for calls that may be sent again."""
        while True:
            try:
                return self._account.grow(num_bytes)
            except ResourceExhaustedError:
                if not self._undelivered.drop_oldest(self._history.rounds):
                    raise
                self._settle_undelivered()

    async def _run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._compute.run(num_bytes, function, *args, **kwargs)
        except MemoryError as error:
            raise ResourceExhaustedError("the server has no memory left for this gradient or average") from error

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Holds the lock; whoever held it looks after the takers before letting go."""
        async with self._lock:
            self._check_open()
            try:
                yield
            finally:
                await self._serve_takers()

    async def _serve_takers(self) -> None:
        while self._closed is None:
            head = self._queue.head(self._rounds.num_accumulated)
            if head is None:
                return
            head.serving = True
            weight = self._rounds.current.total_weight
            try:
                values = await self._run(self._summation.nbytes, self._summation.average, weight)
            except Exception as error:
                # The taker's trouble, not of whoever let go of the lock: that one's change is done.
                self._queue.remove(head)
                if not head.answer.done():
                    head.answer.set_exception(error)
                continue
            self._round_shapes = None
            closed = self._rounds.close()
            average = Average(
                values=values,
                step=self._rounds.global_step,
                round_number=closed.number,
                num_gradients=len(closed.members),
                total_weight=weight,
                worker_ids=closed.worker_ids,
            )
            if self._closed is None:
                self._history.add(average)
                self._keep_undelivered(average, head)
                self._settle()
                self._queue.serve(head, closed, average)

    def _keep_undelivered(self, average: Average, head: Waiter) -> None:
        self._undelivered.expect(head.call)
        self._undelivered.round_ended(average)
        self._settle_undelivered()
        self._ask_for_expiry()

    def expire(self) -> None:
        """Lets go of averages kept for calls whose lease has ended."""
        self._expiry_asked_for = False
        if self._undelivered.expire():
            self._settle_undelivered()
        self._ask_for_expiry()

    def _ask_for_expiry(self) -> None:
        deadline = self._undelivered.next_deadline
        if deadline is not None and not self._expiry_asked_for:
            self._expiry_asked_for = True
            self._expire_at(deadline, self)

    def _recall(self, call: RequestId | None) -> CallRecord | None:
        """Returns what is remembered of a call; what the client received before it is let go of."""
        known = self._calls.recall(call)
        if call is not None and self._undelivered.acknowledge(call):
            self._settle_undelivered()
        return known

    def _end_apply(self, call: RequestId | None, task: "asyncio.Task[Applied]") -> None:
        if _failed(task):
            self._calls.forget(call, task)
        else:
            self._calls.replace(call, task, task.result())

    def _end_take(self, call: RequestId | None, record: _Take, answer: "asyncio.Future[Average]") -> None:
        if _failed(answer):
            self._calls.forget(call, record)
        else:
            # From here on others keep the memory of the average, for as long as they promise.
            record.step, record.round_number = answer.result().step, answer.result().round_number
            record.waiter = None

    async def _await_take(
        self, call: RequestId | None, record: _Take, waiter: Waiter, timeout: float | None
    ) -> Average:
        try:
            return await self._wait(waiter, timeout)
        finally:
            if waiter.answer.cancelled():
                self._calls.forget(call, record)

    async def _wait(self, waiter: Waiter, timeout: float | None) -> Average:
        """Waits for the answer, at most `timeout` seconds."""
        waiter.listeners += 1
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(waiter.answer)
        except TimeoutError:
            if waiter.serving or waiter.answer.done():
                # The round ends for this one, or just has: giving up now would lose it.
                return await asyncio.shield(waiter.answer)
            raise DeadlineExceededError(
                f"accumulator {self.name!r} did not get the {waiter.num_required} gradients required within "
                f"{timeout:g} s: {self._diagnosis()}"
            ) from None
        finally:
            waiter.listeners -= 1
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        """Takes a waiter that nobody waits for any more out of the queue, unless it is just being served."""
        if waiter.listeners == 0 and not waiter.serving and not waiter.answer.done():
            waiter.answer.cancel()
            self._queue.remove(waiter)
            self._wake()

    def _kept(self, step: int, round_number: int) -> Average:
        average = self._history.get(step)
        if average is None or average.round_number != round_number:
            average = self._undelivered.get(round_number)
        if average is None:
            raise AbortedError(
                f"the round of this request_id ended with step {step}, whose average is no longer kept",
                field="request_id",
            )
        return average

    def _diagnosis(self) -> str:
        present = ", ".join(self._rounds.current.worker_ids) or "none named"
        missing = ", ".join(self._rounds.missing_workers())
        if not self._rounds.all_workers_known:
            missing = f"{missing}, others unknown" if missing else "unknown"
        count = self._rounds.num_accumulated
        return (
            f"{count} {'gradient is' if count == 1 else 'gradients are'} in (workers: {present}; "
            f"of the previous round missing: {missing or 'none'}), "
            f"global_step is {self._rounds.global_step}, {len(self._queue)} wait"
        )

    def _wake(self) -> None:
        """Serves takers soon. Whoever holds the lock does so anyway before letting go."""
        if not self._lock.locked() and self._queue.head(self._rounds.num_accumulated) is not None:
            self._own(self._serve())

    async def _serve(self) -> None:
        async with self._exclusive():
            pass

    def _settle(self) -> None:
        held = self._summation.nbytes + self._history.nbytes
        self._account.settle(0 if self._closed is not None else held)

    def _settle_undelivered(self) -> None:
        self._undelivered_account.settle(self._undelivered.nbytes(besides=self._history.rounds))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs work that goes on when its caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_failed)
        return task


def _failed(done: asyncio.Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def _check_num_required(num_required: int) -> None:
    if num_required <= 0:
        raise InvalidArgumentError(
            f"Argument num_required must be positive, but was {num_required}", field="num_required"
        )
