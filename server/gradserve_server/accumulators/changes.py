"""Changes of the rounds of an accumulator: gradients join, takes end rounds, steps are set."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from gradserve_server.accumulators.averages import KeptAverages
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import check_epoch, not_as_a_sum
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.ledger import Event, GradientAnswered, Ledger, StepSet
from gradserve_server.accumulators.rounds import AccumulatorObserver, Applied, Outcome, RoundGate
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.accumulators.waits import TakeQueue, Waiter
from gradserve_server.errors import ServiceError
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks, EagerCall

_WORKER_BYTES = 768
"""The memory of the id of a worker and the digest of its parameters, at most."""
_HELD_BYTES = 1280
"""The memory of a gradient that is held for its order, beside its values."""


class MemberBytes:
    """Counts the memory of the members of one accumulator's rounds."""

    def __init__(self, bookkeeping: Reservation, ledger: Ledger, *, holds_gradients: bool) -> None:
        self._reservation = bookkeeping.another()
        self._ledger = ledger
        self._held_bytes = _HELD_BYTES if holds_gradients else 0
        self._is_closed = False
        self.settle()

    def grow(self, contribution: Contribution) -> None:
        """Counts a member that is about to join; `settle` follows, whether it does or not.

        Raises:
            ResourceExhaustedError: There is no room for it.
        """
        cost = _WORKER_BYTES * self._ledger.num_new(contribution) + self._ledger.other_bytes_of(contribution)
        if self._held_bytes:
            cost += self._held_bytes * contribution.num_gradients
        if cost:
            self._reservation.grow(cost)

    def grow_by(self, num_bytes: int) -> None:
        """Counts something else that the ledger is about to keep; `settle` follows, whether it does or not.

        Raises:
            ResourceExhaustedError: There is no room for it.
        """
        self._reservation.grow(num_bytes)

    def settle(self) -> None:
        """Counts the members that there are; none once it is closed."""
        held = self._held_bytes * self._ledger.rounds.members.count
        named = _WORKER_BYTES * self._ledger.num_named
        self._reservation.settle(0 if self._is_closed else named + held + self._ledger.other_bytes)

    def close(self) -> None:
        """Gives everything back."""
        self._is_closed = True
        self.settle()


P = ParamSpec("P")
T = TypeVar("T")


class RoundChanges:
    """Changes the rounds of one accumulator, one change at a time, in order of arrival.

    A change holds a lock, even while threads do the arithmetic. Before releasing it, the holder also serves the takes
    that now have enough gradients.

    Every change is an event. First the arithmetic is staged, which can fail. Then the journal takes the event. Last,
    the arithmetic is committed and the ledger applies the event, which cannot fail.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        queue: TakeQueue,
        round_sum: RoundSum,
        averages: KeptAverages,
        journal: AccumulatorJournal | None,
        member_bytes: MemberBytes,
        gate: RoundGate,
        observer: AccumulatorObserver,
        shard: Shard | None,
    ) -> None:
        """Takes the parts.

        Args:
            ledger: Decides which gradients count, and remembers the decisions.
            queue: Holds the calls that wait for a round to end, and says when it can end.
            round_sum: Adds up the round.
            averages: Keeps the averages of past rounds.
            journal: Takes every change before it takes effect; None if nothing is durable.
            member_bytes: Counts the memory of the members of a round.
            gate: Lets rounds begin or holds them.
            observer: Notified of what happens.
            shard: This server's shard, which is closed with the accumulator; None if it has none.
        """
        self.ledger = ledger
        self.sum = round_sum
        self.averages = averages
        self.observer = observer
        self.shard = shard
        self.queue = queue
        self._journal = journal
        self._member_bytes = member_bytes
        self._gate = gate
        self._lock = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._closed: ServiceError | None = None

    @property
    def is_under_way(self) -> bool:
        """True while a change is being made that the ledger does not show yet."""
        return self._lock.locked()

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed is not None

    def check_open(self) -> None:
        """Raises the error of `close` if that was called."""
        if self._closed is not None:
            raise self._closed.with_traceback(None)

    async def add(
        self,
        call: RequestId | None,
        contribution: Contribution,
        gradient: Gradient,
        pull: Waiter | None,
        *,
        one_per_worker: bool,
    ) -> Applied:
        """Adds a gradient to the round or drops it; returns the answer once it is durable enough to be sent.

        Args:
            call: The id of its call, if it has one.
            contribution: Its sender, step and weight.
            gradient: Its values.
            pull: Queued for the average of the round if the gradient, or another one of its worker, is in it.
            one_per_worker: Whether to drop the gradient if its worker is already in the round.

        Raises:
            InvalidArgumentError: The gradient is not valid here; nothing has changed.
            ServiceError: A limit was reached, and nothing has changed; or the journal failed, which closes the
                accumulator.
        """
        applied, written = await self._exclusively(self._answer, call, contribution, gradient, pull, one_per_worker)
        if written is not None:
            # Without the lock, so that the next gradient can be handed to the disk at the same time.
            try:
                await written
            except ServiceError as error:
                # The gradient is in the sum, but may not be on disk.
                self.close(error)
                raise
        return applied

    async def make(self, change: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes another change in its turn, even if the caller leaves; returns its result."""
        return await self._tasks.finish(self._exclusively(change, *args, **kwargs))

    async def record(self, event: Event) -> None:
        """Writes the event of a change that is being made; from then on it may take effect."""
        if self._journal is not None:
            await self._journal.append(event)

    async def set_global_step(self, step: int, *, drop_gradients: bool = False) -> None:
        """Sets the step, even if the caller leaves; gradients in the round stay, or are dropped if that changes it."""
        await self.make(self._set_global_step, step, drop_gradients=drop_gradients)

    async def end_epoch(self) -> tuple[int, list[str]]:
        """Begins another epoch; returns it, and the ids of the gradients in the current round and in kept ones."""
        return await self.make(self._end_epoch)

    async def forget_overdue(self, call: RequestId | None) -> None:
        """Records the events by which the arrival of a call shows that earlier ones can be forgotten."""
        try:
            async with self._lock:
                for event in self.ledger.overdue(call):
                    await self.record(event)
                    self.ledger.replay(event)
        finally:
            self.serve_takers()

    def grow_members(self, num_bytes: int) -> None:
        """Counts what a change adds to the ledger; `settle_members` follows, whether it does or not.

        Raises:
            ResourceExhaustedError: There is no room for it.
        """
        self._member_bytes.grow_by(num_bytes)

    def settle_members(self) -> None:
        """Counts the memory of the members that there are, after a change that dropped some."""
        self._member_bytes.settle()

    def serve_takers(self) -> None:
        """Ends the rounds that waiting takes have enough gradients for.

        Does nothing while the lock is held: its holder serves them before releasing it.
        """
        if not self._lock.locked() and self.queue.head(self.ledger.rounds.members) is not None:
            serving = EagerCall(self._exclusively(_change_nothing))  # errors go to the takers
            if not serving.is_done:
                self._tasks.begin(serving.rest())

    def close(self, error: ServiceError) -> None:
        """Ends every wait with `error`, refuses later changes with it, and frees the memory."""
        self._closed = error
        if self.shard is not None:
            self.shard.close(error)
        self.observer.on_close()
        self.queue.close(error)
        self.averages.close(error)
        self.sum.close()
        self.ledger.calls.close()
        self._member_bytes.close()

    async def _exclusively(self, change: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes a change under the lock; before releasing it, serves waiting takes and finishes the sum."""
        try:
            async with self._lock:
                self.check_open()
                try:
                    return await change(*args, **kwargs)
                finally:
                    try:
                        await self._end_rounds()
                    finally:
                        await self.sum.finish()
        finally:
            self.serve_takers()  # for a take that came while the sum was finished

    async def _end_rounds(self) -> None:
        while self._closed is None:
            head = self.queue.head(self.ledger.rounds.members)
            if head is None:
                return
            head.serving = True
            try:
                await self.end_round(head)
            except Exception as error:
                # The error is the taker's, not that of the lock's holder, whose change is done.
                self.queue.remove(head)
                head.fail(error)

    # Under the lock

    async def _set_global_step(self, step: int, *, drop_gradients: bool = False) -> None:
        rounds = self.ledger.rounds
        dropped, is_back = rounds.current, step < rounds.global_step
        event = StepSet(
            step,
            self.averages.beyond(step) if is_back else (),
            drop_gradients and step != rounds.global_step and rounds.members.count > 0,
        )
        await self.record(event)
        self.ledger.set_step(event)
        if event.drops_round:
            self.sum.drop()
            self._member_bytes.settle()
            self.observer.on_drop()
            self.queue.drop(dropped)
        if self._closed is None:
            self.averages.step_set(step, event.abandoned)

    async def _end_epoch(self) -> tuple[int, list[str]]:
        rounds = self.ledger.rounds
        await self._set_global_step(rounds.global_step)
        kept = {each.round_number: each.parts for each in self.averages.all_kept if each.parts is not None}
        counted = [part_id for parts in kept.values() for part_id in parts.ids]
        return rounds.epoch, counted + [each.part for each in rounds.members.held]

    async def _answer(
        self,
        call: RequestId | None,
        contribution: Contribution,
        given: Gradient,
        pull: Waiter | None,
        one_per_worker: bool,
    ) -> tuple[Applied, asyncio.Future[None] | None]:
        event = self.ledger.judge(
            call, contribution, given, one_per_worker=one_per_worker, awaits_average=pull is not None
        )
        outcome, contribution = event.outcome, event.contribution
        if contribution.sum_of and outcome is Outcome.ALREADY_COUNTED:
            raise not_as_a_sum("a worker is in the round already, or twice in the sum")
        if outcome is Outcome.ACCEPTED:
            self._gate.check(self.ledger.rounds.members.count)
            check_epoch(contribution, self.ledger.rounds.epoch)
        written = None
        if outcome is Outcome.ACCEPTED:
            num_bytes, written = await self._accept(event, given)
        else:
            joins = outcome is not Outcome.STALE
            num_bytes = (await self.sum.check(given, contribution, joins=joins)).nbytes
            await self.record(event)
        applied = self.ledger.answer(event)
        self.observer.on_answer(contribution, outcome, num_bytes)
        if self._closed is not None:
            self._member_bytes.settle()
        if pull is not None and applied.round is not None and not pull.answer.cancelled():
            pull.round = applied.round
            self.queue.append(pull)
        return applied, written

    async def _accept(self, event: GradientAnswered, given: Gradient) -> tuple[int, asyncio.Future[None] | None]:
        """Adds a gradient to the sum; returns its size in bytes, and the future of `AccumulatorJournal.accept`."""
        staged = await self.sum.stage(given, event.contribution)
        try:
            self._member_bytes.grow(event.contribution)
            given.check_lenders()
            written = None if self._journal is None else await self._journal.accept(event, staged.gradient)
            if written is not None and staged.gradient.is_adoptable:
                await written  # the sum may take over the memory that is still being written
        except BaseException:
            self.sum.settle()
            self._member_bytes.settle()
            raise
        await self.sum.commit(staged)
        return staged.gradient.nbytes, written

    async def end_round(self, head: Waiter) -> None:
        """Ends the round; only within a change.

        Args:
            head: What the round was waited for with.

        Raises:
            ServiceError: There is no room for its result, and nothing has changed; or the journal failed, which closes
                the accumulator.
        """
        staged = await self.sum.stage_average(self.ledger.rounds.members.total_weight)
        event = self.ledger.ending(head.call if head.round is None else None)
        try:
            if self._journal is not None:
                await self._journal.reserve(self.sum.nbytes)
                await self._journal.append(event)
        except BaseException:
            self.sum.settle()
            raise
        values = await self.sum.commit_average(staged)
        average = self.averages.of_current(self.ledger.rounds, values)
        answered = self.ledger.answered_by(event)
        if self._journal is not None:
            try:
                seen = self.observer.about_to_end(average.step, head.closing.num_required)
                await self._journal.settle(average, answered, seen)
            except ServiceError as error:
                # The sum is gone, but the round may not be on disk.
                self.close(error)
                raise
        is_compared = len(self.ledger.rounds.members.digests) > 1
        ended = self.ledger.end_round(event)
        self.observer.on_round_end(ended, head.closing.num_required)
        if is_compared:
            self.observer.on_comparison(self.ledger.rounds.comparison)
        self._member_bytes.settle()
        if self._closed is not None:
            average.release()
            return
        self.averages.add(average, answered)
        self.sum.settle()
        self.queue.serve(head, ended, average)


async def _change_nothing() -> None:
    """Makes no change: for the steps that follow every change."""
