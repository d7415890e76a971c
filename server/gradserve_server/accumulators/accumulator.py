"""One accumulator: orders the calls on it, and answers them."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gradserve_server.accumulators.changes import RoundChanges
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient, OpenGradient, drop
from gradserve_server.accumulators.identity import CallsUnderWay, RequestId
from gradserve_server.accumulators.incoming import check_contribution, not_as_a_sum
from gradserve_server.accumulators.ledger import Taken
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.rounds import (
    OF_ACCUMULATORS,
    AccumulatorState,
    Applied,
    ClosingRule,
    Outcome,
    Rounds,
    SeenRound,
    Wording,
)
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.waits import LiveWorkers, Waiter, Waits
from gradserve_server.errors import AbortedError, DeadlineExceededError, InvalidArgumentError, ServiceError
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks, EagerCall
from gradserve_server.storage.journal import Durability

NOT_COUNTED_FIELD = "worker_id"
"""The field of the timeout of a push_pull whose own gradient is not in the round."""


@dataclass(frozen=True, eq=False)
class _InSum:
    """The addition of a sum that has the gradient of a call."""

    adding: asyncio.Task[Applied]


_UnderWay: TypeAlias = asyncio.Task[Applied] | _InSum | Waiter


class Accumulator:
    """Averages gradients in rounds. `AccumulatorService` in the protos defines the semantics.

    Lives on one event loop. A call with an id counts once, however often it is sent. A change that has begun is
    finished even if its caller leaves. Waiting takes no thread.
    """

    def __init__(
        self,
        name: str,
        spec: AccumulatorSpec,
        incarnation: str,
        changes: RoundChanges,
        waiters: Reservation,
        wording: Wording = OF_ACCUMULATORS,
    ) -> None:
        """Takes its parts.

        Args:
            name: Its name, for messages.
            spec: Its fixed properties.
            incarnation: An id that no other accumulator of the same name has.
            changes: Makes the changes of its rounds.
            waiters: The budget of waiting calls, shared by all accumulators.
            wording: What messages call it.
        """
        self.name = name
        self.spec = spec
        self.incarnation = incarnation
        self._changes = changes
        self._ledger, self._sum, self._averages = changes.ledger, changes.sum, changes.averages
        self.rounds: Rounds = changes.ledger.rounds
        """The rounds, read-only."""
        self.place: Place = changes.sum.place
        """The memory that holds its sum and its averages."""
        self.sum_spec: AccumulatorSpec = changes.sum.spec
        """The spec of its sum, which has no components if the accumulator is sharded."""
        self._observer = changes.observer
        self._waiters = waiters
        self.queue = changes.queue
        """The calls that wait."""
        self.shard = changes.shard
        """This server's shard; None if it has none. The accumulator's own sum then has no components."""
        self._under_way: CallsUnderWay[_UnderWay] = CallsUnderWay()
        gave_up = _gave_up(self._under_way, changes)
        self._waits = Waits(name, self._ledger.rounds, self.queue, self._observer, gave_up, wording)
        self._workers = LiveWorkers(name, wording)
        self._tasks = BackgroundTasks()

    @property
    def num_accumulated(self) -> int:
        """The number of gradients accepted since the last take."""
        return self._ledger.rounds.num_accumulated

    @property
    def is_changing(self) -> bool:
        """True while a gradient is being added or a round is ending, before `num_accumulated` shows it."""
        return self._changes.is_under_way

    @property
    def durability(self) -> Durability | None:
        """The changes that survive the end of the server; None for none."""
        return self.spec.durability

    @property
    def num_bytes(self) -> int:
        """The memory of its sum and its averages."""
        return self._sum.nbytes + self._averages.nbytes + (0 if self.shard is None else self.shard.num_bytes)

    @property
    def state(self) -> AccumulatorState:
        """The accumulator's current state."""
        rounds = self._ledger.rounds
        return AccumulatorState(
            global_step=rounds.global_step,
            epoch=rounds.epoch,
            num_accumulated=rounds.num_accumulated,
            num_waiting=len(self.queue),
            num_bytes=self.num_bytes,
            worker_ids=tuple(rounds.members.workers),
            kept_steps=self._averages.history.steps,
            different_workers=rounds.comparison.different,
        )

    def outcome_of(self, call: RequestId) -> tuple[str, int]:
        """Returns what is known of a call, as `RequestStatus` says: the outcome, "" if nothing is, and the step."""
        outcome, step = self._ledger.outcome_of(call)
        return (outcome, step) if outcome or self._under_way.find(call) is None else ("waiting", 0)

    async def apply(
        self, call: RequestId | None, contribution: Contribution, open_gradient: OpenGradient
    ) -> tuple[Applied, bool]:
        """Adds a gradient to the round, or drops it as stale; also returns whether the call was a duplicate.

        Raises:
            InvalidArgumentError: The gradient is not valid here, or each worker counts once and another client is
                waiting with this worker_id; nothing has changed.
            ServiceError: `open_gradient` failed, or a limit was reached; nothing has changed.
        """
        if self.spec.one_per_worker:
            await self._workers.check(call, contribution, None)
        return await self._apply_once(call, contribution, open_gradient, pull=None, one_per_worker=False)

    async def take(self, call: RequestId | None, num_required: int, timeout: float | None) -> tuple[Average, bool]:
        """Waits for enough gradients and ends the round; also returns whether the call was a duplicate.

        Raises:
            InvalidArgumentError: `num_required` is not positive.
            DeadlineExceededError: Too few gradients arrived within `timeout` seconds; nothing has changed.
            AbortedError: The average of an earlier call is no longer kept, or the accumulator was deleted.
        """
        closing = ClosingRule(num_required)
        await self.forget_overdue(call)
        taken = self._recall(call)
        first = self._under_way.find(call)
        self._changes.check_open()
        with self._waiters.another(1), self._ledger.calls.room_for(call):
            if call is not None and (isinstance(taken, Applied) or isinstance(first, asyncio.Task | _InSum)):
                raise call.other_content()
            if taken is not None:
                assert isinstance(taken, Taken), "gradients are refused above"
                return self._answer(self._averages.of_round(taken.round)), True
            if first is not None:
                assert isinstance(first, Waiter), "gradients are refused above"
                return await self._taken(first, timeout), True
            waiter = Waiter(closing, call=call)
            self.queue.append(waiter)
            self._changes.serve_takers()
            if not waiter.answer.done():
                self._under_way.begin(call, waiter)
                waiter.answer.add_done_callback(lambda _: self._under_way.end(call, waiter))
            return await self._taken(waiter, timeout), False

    async def _taken(self, waiter: Waiter, timeout: float | None) -> Average:
        average = await self._waits.until_answered(waiter, timeout)
        assert average is not None, "only a push_pull waits for one round"
        return self._answer(average)

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
            call: The call's id, if it has one.
            contribution: The sender, step and weight of the gradient.
            open_gradient: Opens the gradient.
            num_required: The number of gradients that end the round.
            timeout: Seconds to wait; None for no limit.
            one_per_worker: Whether to count only the first gradient of each worker in a round. Later ones are dropped,
                and wait for the average of the first one's round.

        Returns:
            The outcome of the gradient; the average of its round, or if it was stale the newest average, if any; and
            whether the call was a duplicate.

        Raises:
            InvalidArgumentError: Another client is waiting with the same worker_id; nothing has changed.
            ServiceError: See `apply` and `take`. If the wait fails, the gradient stays in the round. A
                DeadlineExceededError with the field "worker_id" says that another gradient of its worker is there.
        """
        closing = ClosingRule(num_required)
        if one_per_worker or self.spec.one_per_worker:
            await self._workers.check(call, contribution, timeout)
        with self._waiters.another(1), self._workers.pulling(call, contribution):
            waiter = Waiter(closing, call=call)
            try:
                applied, duplicate = await self._apply_once(
                    call, contribution, open_gradient, pull=waiter, one_per_worker=one_per_worker
                )
                if not applied.still_counts() or applied.round is None:
                    return self._as_stale(applied, call, duplicate)
                if duplicate:
                    self._changes.check_open()
                    if applied.round.step is not None:
                        return applied, self._answer(self._averages.of_round(applied.round)), duplicate
                    waiter.round = applied.round
                    self.queue.append(waiter)
                    self._changes.serve_takers()
                try:
                    with self._ledger.calls.waiting(call, *contribution.calls):
                        average = await self._waits.until_answered(waiter, timeout)
                except DeadlineExceededError as error:
                    if applied.outcome is Outcome.ALREADY_COUNTED:
                        error.field = NOT_COUNTED_FIELD
                    raise
                if average is None:
                    return self._as_stale(applied, call, duplicate)
                return applied, self._answer(average), duplicate
            finally:
                self._waits.leave(waiter)

    def _as_stale(
        self, applied: Applied, call: RequestId | None, duplicate: bool
    ) -> tuple[Applied, Average | None, bool]:
        """Returns the answer to a push_pull whose gradient does not count, with the newest average."""
        newest = self._averages.history.newest()
        if newest is not None:
            self._averages.hold(newest, call)
            newest = self._answer(newest)
        return replace(applied, outcome=Outcome.STALE, round=None), newest, duplicate

    async def read_average(self, step: int | None, timeout: float | None, call: RequestId | None = None) -> Average:
        """Waits for the average of the round that leads to `step`; returns the newest one for None.

        Args:
            step: The step.
            timeout: Seconds to wait; None for no limit.
            call: The id of the call, if it has one. The average of a sharded accumulator is kept for it, as for a take.

        Raises:
            OutOfRangeError: The average is not kept, or no round led to that step.
            DeadlineExceededError: No round led there within `timeout` seconds.
        """
        self._changes.check_open()
        if call is not None:
            self._averages.acknowledge(call)
        with self._waiters.another(1):
            average = await self._waits.until_read(self._averages.history, step, timeout)
            while not self._averages.hold(average, call):  # dropped because many rounds ended since
                average = await self._waits.until_read(self._averages.history, step, timeout)
            return self._answer(average)

    async def set_global_step(self, step: int, *, drop_gradients: bool = False) -> None:
        """Sets the step; gradients in the round stay in it, or are dropped if the step is another one."""
        await self._changes.set_global_step(step, drop_gradients=drop_gradients)

    async def end_epoch(self) -> tuple[int, list[str]]:
        """Begins another epoch; returns it, and the ids of all gradients staged before it that count.

        Raises:
            InvalidArgumentError: The accumulator is not sharded.
        """
        if not self.spec.num_shards:
            raise InvalidArgumentError(f"accumulator {self.name!r} is not sharded", field="accumulator.name")
        return await self._changes.end_epoch()

    def close(self, error: ServiceError) -> None:
        """Ends every wait with `error`, refuses later calls with it, and frees the memory."""
        self._changes.close(error)

    async def forget_overdue(self, call: RequestId | None) -> None:
        """Records the events by which the arrival of a call shows that earlier ones can be forgotten."""
        if not self._ledger.overdue(call) or self._changes.is_closed:
            return
        self._ledger.calls.recall(call)  # raises for a refused call, which shows nothing
        await self._changes.forget_overdue(call)

    # Recovery

    async def add_again(self, gradient: Gradient, contribution: Contribution) -> None:
        """Adds a gradient of the current round, which the ledger already has, to the sum; before any call.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        by_name = self._sum.spec.by_name
        if any(value.dtype != by_name[name].dtype for name, value in gradient.dense.items()):
            gradient = replace(gradient, is_wide=True)  # it came packed, or as a sum
        await self._sum.commit(await self._sum.stage(gradient, contribution))
        await self._sum.finish()

    def see_again(self, seen: Sequence[SeenRound]) -> None:
        """Tells the observer what an earlier run of the server has kept of the last rounds."""
        self._observer.on_restore(seen)

    async def keep_again(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps the average of an ended round, as at its end; before any call."""
        await self._averages.keep_again(average, answered)

    # Calls that count once

    async def _apply_once(
        self,
        call: RequestId | None,
        contribution: Contribution,
        open_gradient: OpenGradient,
        pull: Waiter | None,
        one_per_worker: bool,
    ) -> tuple[Applied, bool]:
        check_contribution(self.name, self.spec, contribution)
        await self.forget_overdue(call)
        # In this order: a remembered call may still wait for the disk.
        first = self._under_way.find(call)
        while isinstance(first, _InSum):
            # Then it has an answer of its own. If the sum fails, perhaps because of another gradient, it goes alone.
            await asyncio.wait([first.adding])
            self._under_way.end(call, first)
            first = self._under_way.find(call)
        known = first or self._recall(call)
        if known is not None:
            if isinstance(known, Taken | Waiter):
                assert call is not None, "only calls with ids are known"
                raise call.other_content()
            self._observer.on_repeat()
            if isinstance(known, Applied):
                applied = known
            else:
                try:
                    applied = await asyncio.shield(known)
                except AbortedError as error:
                    if not error.caller_left:
                        raise
                    # The first caller left, but this one has the gradient, too. It may get here before the first call's
                    # callback, and must not join that call again.
                    self._under_way.end(call, known)
                    return await self._apply_once(call, contribution, open_gradient, pull, one_per_worker)
            # Frees the tensors of a repeated call as those of the first, unless they are the same.
            with contextlib.suppress(ServiceError):
                await open_gradient(drop)
            return applied, True
        if contribution.sum_of:
            await self._check_sum(contribution)
        once = one_per_worker or self.spec.one_per_worker
        applying = EagerCall(self._apply(call, contribution, open_gradient, pull, one_per_worker=once))
        if applying.is_done:
            return applying.result(), False
        task = self._tasks.begin(applying.rest())
        self._note_under_way(call, task, task)
        for each in contribution.calls:
            self._note_under_way(each, task, _InSum(task))
        return await asyncio.shield(task), False

    def _note_under_way(self, call: RequestId | None, adding: asyncio.Task[Applied], work: _UnderWay) -> None:
        self._under_way.begin(call, work)
        adding.add_done_callback(lambda _: self._under_way.end(call, work))

    async def _apply(
        self,
        call: RequestId | None,
        contribution: Contribution,
        open_gradient: OpenGradient,
        pull: Waiter | None,
        *,
        one_per_worker: bool,
    ) -> Applied:
        try:
            with self._ledger.calls.room_for(call, *contribution.calls):
                return await open_gradient(
                    lambda given: self._changes.add(call, contribution, given, pull, one_per_worker=one_per_worker)
                )
        except ServiceError as error:
            self._observer.on_refusal(error)
            raise

    async def _check_sum(self, contribution: Contribution) -> None:
        """Checks that no call whose gradient is in a sum was answered before or is in flight."""
        for call in contribution.calls:
            await self.forget_overdue(call)
        for call in contribution.calls:
            if self._under_way.find(call) is not None or self._recall(call) is not None:
                raise not_as_a_sum(f"the call {call.client_id}:{call.sequence} has been made before")

    def _recall(self, call: RequestId | None) -> Applied | Taken | None:
        """Returns the remembered outcome of a call, and releases the averages that its client has received."""
        known = self._ledger.calls.recall(call)
        if call is not None:
            self._averages.acknowledge(call)
        return known

    def _answer(self, average: Average) -> Average:
        return self._averages.answered(average, self._ledger.rounds)


def _gave_up(under_way: CallsUnderWay[_UnderWay], changes: RoundChanges) -> Callable[[Waiter], None]:
    """Returns the function to call when a waiter gives up; it does not keep the accumulator alive."""

    def gave_up(waiter: Waiter) -> None:
        # At once, not in a callback: the same call may arrive again in this turn of the loop.
        under_way.end(waiter.call, waiter)
        changes.serve_takers()

    return gave_up
