"""One server's shard of an accumulator."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from gradserve_server.accumulators.gradient import (
    Average,
    Contribution,
    Gradient,
    OpenGradient,
    RoundParts,
    Summand,
    drop,
    sum_of_weights,
)
from gradserve_server.accumulators.journal import PartKey, ShardJournal, Staged
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.sharding.running_sum import RunningSum
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.errors import AbortedError, InvalidArgumentError, ServiceError
from gradserve_server.resources.budget import Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks, InTurns

T = TypeVar("T")
_PART_BYTES = 2048
"""The memory of a gradient that is held, beside its values."""
_PARTS_FIELD = "average.parts.part_ids"


@dataclass(eq=False)
class _Part:
    """A held gradient.

    Attributes:
        staged: Its description.
        sum: A sum of this gradient alone, which counts its memory.
    """

    staged: Staged
    sum: RoundSum


@dataclass(eq=False)
class _Reduced:
    """A round whose average is computed or being computed.

    Attributes:
        parts: The gradients of the round, as decided by the home.
        answer: The computation of the average.
        nbytes: The memory of the average, once it is computed.
    """

    parts: RoundParts
    answer: asyncio.Task[Average] = field(init=False)
    nbytes: int = 0


class Shard:
    """Holds gradients for some components or rows, and averages those that the accumulator's home names.

    Belongs to one incarnation of the accumulator at its home, and decides nothing. A held gradient has no effect until
    a client that knows the home's decision asks for the average of its round. Every client that asks for the round gets
    the same average, whichever other gradients are there.

    Forgets everything that no round needs any more: rounds that the home no longer keeps and gradients that can be in
    no other round, as its answers say (`RoundParts.may_need`); gradients that do not count and that their client
    withdraws; and those that will never count according to the home (`forget`). These statements stay true, so their
    order does not matter.

    Lives on one event loop; threads do the arithmetic.
    """

    def __init__(
        self,
        name: str,
        spec: AccumulatorSpec,
        *,
        make_sum: Callable[[], RoundSum],
        make_running_sum: Callable[[], RoundSum] | None,
        memory: Reservation,
        bookkeeping: Reservation,
        journal: ShardJournal | None,
        clock: Callable[[], float] = time.monotonic,
        call_seconds: float = 60.0,
    ) -> None:
        """Takes its parts.

        Args:
            name: The accumulator's name, for messages.
            spec: The spec of the shard.
            make_sum: Makes a sum of gradients in the order that the home decides.
            make_running_sum: Makes a sum of gradients as they arrive; None if they must be held.
            memory: The budget of bytes of averages.
            bookkeeping: The budget of bytes of memory beside tensors.
            journal: Writes the gradients that are held; None if they need not survive a restart.
            clock: A monotonic clock, in seconds.
            call_seconds: The time within which the call of a gradient staged without an epoch reaches the home; after
                that, the home is to be asked about it.
        """
        self.sum_spec = spec
        """The spec of the shard."""
        self._name = name
        self._make_sum = make_sum
        self._make_running_sum = make_running_sum
        self._journal = journal
        self._averages = memory.another()
        self._bookkeeping = bookkeeping.another()
        self._place = make_sum().place
        self._parts: dict[PartKey, _Part] = {}
        self._since: dict[PartKey, float] = {}
        """The time at which each was staged or last counted according to the home; the earliest first."""
        self._running: dict[Staged, RunningSum] = {}
        """By the description of their gradients."""
        self._staging: dict[PartKey, asyncio.Task[None]] = {}
        self._reduced: dict[int, _Reduced] = {}
        """By the numbers of the rounds."""
        self._reducing: list[_Reduced] = []
        """The rounds whose averages are being computed, even if they are over."""
        self._averaged: set[PartKey] = set()
        """The gradients in these rounds, which need not be held again."""
        self._told: tuple[int, int, int, int] | None = None
        """The rounds and gradients that are over, according to the latest answer of the home."""
        self._clock = clock
        self._call_seconds = call_seconds
        self._asked_at = clock()
        self._tasks = BackgroundTasks()
        self._closed: ServiceError | None = None

    @property
    def place(self) -> Place:
        """The memory of its gradients and averages."""
        return self._place

    @property
    def num_parts(self) -> int:
        """The number of held gradients."""
        return len(self._parts)

    @property
    def num_bytes(self) -> int:
        """The memory of its gradients and averages."""
        return sum(each.nbytes for each in self._sums) + self._averages.used

    @property
    def _sums(self) -> list[RoundSum]:
        return [*[each.sum for each in self._parts.values()], *[each.sum for each in self._running.values()]]

    async def stage(
        self,
        key: PartKey,
        local_step: int,
        open_gradient: OpenGradient,
        *,
        weight: float = 1.0,
        can_stage_again: bool = False,
        is_sum: bool = False,
        epoch: int | None = None,
    ) -> bool:
        """Holds a gradient; returns whether it was there already. Goes on if the caller is cancelled.

        Args:
            key: Its name.
            local_step: The step at which it was computed.
            open_gradient: Opens it.
            weight: Its weight.
            can_stage_again: Whether its client keeps it. Then it is added to others at once instead of being held, if
                it is in memory of the client and would have to be copied.
            is_sum: Whether it is a sum of gradients, whose values are in the dtypes of the sums. A sum is always held:
                if its client is killed, it is lost.
            epoch: The epoch in which it is staged, the only one in which it may count; None: any.

        Raises:
            InvalidArgumentError: The gradient is not valid here; nothing has changed.
            ServiceError: `open_gradient` failed, or a limit was reached; nothing has changed.
        """
        self._check_open()
        under_way = self._staging.get(key)
        staged = Staged(epoch, local_step)
        running = self._running.get(staged)
        is_there = key in self._parts or key in self._averaged or (running is not None and key.id in running.weights)
        if is_there or under_way is not None:
            if under_way is not None:
                try:
                    await asyncio.shield(under_way)
                except AbortedError as error:
                    if not error.caller_left:
                        raise
                    # The first caller left, but this one has the gradient, too. It may get here before the first call's
                    # callback, and must not join that call again.
                    self._end_staging(key, under_way)
                    return await self.stage(
                        key,
                        local_step,
                        open_gradient,
                        weight=weight,
                        can_stage_again=can_stage_again,
                        is_sum=is_sum,
                        epoch=epoch,
                    )
            await self._stage_again_in(key, epoch)
            await open_gradient(drop)
            return True
        weight_if_kept = weight if can_stage_again and not is_sum else None
        task = self._tasks.begin(self._stage(key, staged, open_gradient, weight_if_kept, is_sum=is_sum))
        self._staging[key] = task
        task.add_done_callback(partial(self._end_staging, key))
        await asyncio.shield(task)
        return False

    def _end_staging(self, key: PartKey, task: asyncio.Task[None]) -> None:
        """Ends the staging of a gradient by this task, unless another task has begun since."""
        if self._staging.get(key) is task:
            del self._staging[key]

    async def stage_again(self, key: PartKey, staged: Staged, gradient: Gradient) -> None:
        """Holds a gradient that an earlier run of the server held.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        by_name = self.sum_spec.by_name
        is_sum = any(value.dtype != by_name[name].dtype for name, value in gradient.dense.items())
        self._hold(key, await self._held(staged, gradient, None, is_sum=is_sum))

    async def reduce(self, decided: Average) -> Average:
        """Returns this shard of an average.

        Args:
            decided: The average as answered by the home, without values.

        Raises:
            AbortedError: A gradient of the round is not here.
            InvalidArgumentError: The round was reduced with other gradients.
            ResourceExhaustedError: There is not enough memory.
        """
        self._check_open()
        assert decided.parts is not None, "the caller has checked that"
        parts = decided.parts
        number = decided.round_number
        known = self._reduced.get(number)
        if known is None:
            known = self._reduced[number] = _Reduced(parts)
            self._reducing.append(known)
            known.answer = self._tasks.begin(self._reduce(known, decided))
        elif (known.parts.ids, known.parts.weights, known.parts.sums) != (parts.ids, parts.weights, parts.sums):
            raise InvalidArgumentError(
                f"expected the gradients with which round {number + 1} of accumulator {self._name!r} was reduced here, "
                f"{len(known.parts.ids)} of them, got {len(parts.ids)} others",
                field=_PARTS_FIELD,
            )
        average = await asyncio.shield(known.answer)
        await self._tasks.finish(self._forget_before(parts))
        return average

    async def withdraw(self, keys: Collection[PartKey]) -> None:
        """Forgets gradients that do not count, as their client knows from the home."""
        self._check_open()
        await self._tasks.finish(self._forget([key for key in keys if key in self._parts]))

    def sums_of(self, keys: Collection[PartKey]) -> list[RoundSum]:
        """Returns sums of one held gradient each, in the order of names; they stay until they are withdrawn.

        Raises:
            AbortedError: One of them is not here; nothing has changed.
        """
        self._check_open()
        held = [self._parts[key].sum for key in keys if key in self._parts]
        if len(held) < len(keys):
            raise AbortedError(
                f"this server has {len(held)} of {len(keys)} updates of {self._name!r} that their home has counted: it "
                "was started again and lost the others",
                field="decided.part_ids",
                code="GS_SHARD_LOST",
            )
        return held

    def with_others(self, key: PartKey) -> tuple[Gradient, dict[str, Gradient]] | None:
        """Returns a held gradient, and all others of its incarnation by their ids; None if it is not here."""
        self._check_open()
        if key not in self._parts:
            return None
        found = {each: part.sum.held[0] for each, part in self._parts.items() if each[0] == key[0]}
        own = found.pop(key)
        return own, {each.id: gradient for each, gradient in found.items()}

    def opening(self, key: PartKey) -> OpenGradient:
        """Returns what opens a held gradient for the call that it was staged for, and forgets it after that.

        The call raises AbortedError if it is not here.
        """

        async def open_held(use: Callable[[Gradient], Awaitable[T]]) -> T:
            if key not in self._parts:
                raise AbortedError(f"the update of {self._name!r} is not staged here: stage it again", field="update")
            (gradient,) = self._parts[key].sum.held
            result = await use(replace(gradient, owned=False, memory=()))
            await self.withdraw([key])
            return result

        return open_held

    async def forget_older(self, step: int) -> None:
        """Forgets gradients that were computed before a step, as they can count no more."""
        await self._forget([key for key, part in self._parts.items() if part.staged.local_step < step])

    async def forget(self, epoch: int, counted: Collection[str]) -> int:
        """Forgets gradients of earlier epochs that do not count; returns their number.

        Args:
            epoch: The epoch that the home has begun.
            counted: The ids of all gradients of earlier epochs that count, as answered by the home.
        """
        self._check_open()
        now = self._clock()
        unneeded = []
        for key, part in self._parts.items():
            if key.id in counted:
                self._note(key)
            elif part.staged.epoch is None:
                if self._since[key] <= now - self._call_seconds:
                    unneeded.append(key)
            elif part.staged.epoch < epoch:
                unneeded.append(key)
        sums = [
            staged
            for staged, each in self._running.items()
            if (staged.epoch is None or staged.epoch < epoch) and each.weights.keys().isdisjoint(counted)
        ]
        await self._tasks.finish(self._forget(unneeded, sums))
        return len(unneeded)

    def asks_for_old_gradients(self) -> bool:
        """Returns True, once per `call_seconds`, if some gradients are so old that the home should be asked."""
        oldest = next(iter(self._since.values()), None)
        now = self._clock()
        if oldest is None or max(oldest, self._asked_at) > now - self._call_seconds:
            return False
        self._asked_at = now
        return True

    def close(self, error: ServiceError) -> None:
        """Refuses later calls with `error`, and frees the memory."""
        self._closed = error
        for each in self._sums:
            each.close()
        self._parts.clear()
        self._since.clear()
        self._running.clear()
        self._reduced.clear()
        self._averaged.clear()
        self._settle()

    async def _stage(
        self,
        key: PartKey,
        staged: Staged,
        open_gradient: OpenGradient,
        weight_if_kept: float | None,
        *,
        is_sum: bool,
    ) -> None:
        async def hold(given: Gradient) -> None:
            if weight_if_kept is not None and await self._added(key, staged, given, weight_if_kept):
                return
            part = await self._held(staged, given, key, is_sum=is_sum)
            if self._closed is not None:
                part.sum.close()
                raise self._closed
            self._hold(key, part)
            self._settle()

        await open_gradient(hold)

    async def _stage_again_in(self, key: PartKey, epoch: int | None) -> None:
        """Records, also on disk, that a held gradient was staged again in a later epoch."""
        held = self._parts.get(key)
        if held is None or epoch is None or (held.staged.epoch is not None and held.staged.epoch >= epoch):
            return
        held.staged = held.staged._replace(epoch=epoch)
        written = None if self._journal is None else self._journal.stage_again(key, epoch)
        if written is not None:
            await written

    def _hold(self, key: PartKey, part: _Part) -> None:
        self._parts[key] = part
        self._note(key)

    def _note(self, key: PartKey) -> None:
        self._since.pop(key, None)
        self._since[key] = self._clock()

    async def _added(self, key: PartKey, staged: Staged, given: Gradient, weight: float) -> bool:
        """Adds a gradient to the running sum of its step; returns False if it has to be held."""
        if self._make_running_sum is None or not given.live:
            return False
        running = self._running.get(staged)
        if running is None:
            running = self._running[staged] = RunningSum(self._make_running_sum())
        return await running.add(key.id, weight, given, self._check_rows)

    async def _held(self, staged: Staged, given: Gradient, key: PartKey | None, *, is_sum: bool) -> _Part:
        """Returns a gradient in a sum of its own, once it is on disk if it has a key."""
        own = self._make_sum()
        self._bookkeeping.grow(_PART_BYTES)
        try:
            change = await own.stage(given, Contribution(sum_of=(Summand(),) if is_sum else ()))
            try:
                self._check_rows(change.gradient)
                given.check_lenders()
                if key is not None and self._journal is not None:
                    written = await self._journal.accept(key, staged, change.gradient)
                    if written is not None:
                        await written
            except BaseException:
                own.settle()
                raise
            await own.commit(change)
        except BaseException:
            self._settle()
            raise
        finally:
            await own.finish()
        return _Part(staged, own)

    def _check_rows(self, gradient: Gradient) -> None:
        """Checks that rows have the component's sizes, so that those of all gradients of a round fit each other."""
        for component in self.sum_spec.components:
            if component.is_sparse and component.shape.dims is not None:
                sizes, expected = gradient.sparse[component.name].values.shape[1:], component.shape.dims[1:]
                if sizes != expected:
                    raise InvalidArgumentError(
                        f"expected rows of shape {list(expected)}, got {list(sizes)}",
                        field=f"{component.field}.sparse.values.shape",
                    )

    async def _reduce(self, reduced: _Reduced, decided: Average) -> Average:
        number, parts = decided.round_number, reduced.parts
        try:
            average = await self._reduced_average(decided, parts)
        except BaseException:
            if self._reduced.get(number) is reduced:
                del self._reduced[number]  # a later attempt may succeed
            raise
        finally:
            self._reducing.remove(reduced)
        members = [PartKey(parts.home_incarnation, each) for each in parts.ids]
        if self._reduced.get(number) is reduced:  # the round may be over by now
            reduced.nbytes = average.nbytes
            self._averaged.update(members)
        await self._drop(members)
        return average

    async def _reduced_average(self, decided: Average, parts: RoundParts) -> Average:
        staged = await self._in_running(decided, dict(zip(parts.ids, parts.weights, strict=True)))
        added = () if staged is None else self._running[staged].weights
        contributions = {
            part_id: contribution for part_id, contribution in parts.contributions.items() if part_id not in added
        }
        held = self._members(decided, parts.home_incarnation, contributions)
        total = self._make_sum() if staged is None else self._running.pop(staged).sum
        try:
            if staged is None:
                await total.borrow([each.sum for each in held], contributions.values())
            else:
                for part, contribution in zip(held, contributions.values(), strict=True):
                    await total.add_of(part.sum, contribution)
                    await total.finish()
            values = await total.commit_average(await total.stage_average(sum_of_weights(parts.weights)))
        finally:
            total.close()
        self._check_open()
        return replace(decided, values=values, parts=None)

    async def _in_running(self, decided: Average, weights: Mapping[str, float]) -> Staged | None:
        """Ends the running sum with gradients of a round; returns their description, None if there is no such sum.

        Raises:
            AbortedError: The sum has other gradients, too, or is not the only one: it is useless, and gone now.
        """
        found = {staged: each for staged, each in self._running.items() if not weights.keys().isdisjoint(each.weights)}
        for each in found.values():
            await each.end()  # an addition may have been in progress
        # Another round with gradients of the same sum may have used or discarded it in the meantime.
        found = {staged: each for staged, each in found.items() if self._running.get(staged) is each}
        if not found:
            return None
        (staged, running), *others = found.items()
        if not others and running.weights.items() <= weights.items():
            return staged
        for staged in found:
            self._running.pop(staged).close()
        raise AbortedError(
            f"gradients of round {decided.round_number + 1} of accumulator {self._name!r} were added up with others, "
            "which the home has not accepted: stage them again",
            field=_PARTS_FIELD,
        )

    def _members(self, decided: Average, home_incarnation: str, ids: Collection[str]) -> Sequence[_Part]:
        keys = [PartKey(home_incarnation, each) for each in ids]
        held = [self._parts[key] for key in keys if key in self._parts]
        if len(held) < len(keys):
            raise AbortedError(
                f"this server has {len(held)} of the {len(keys)} gradients of round {decided.round_number + 1} of "
                f"accumulator {self._name!r}: it was started again and lost the others, or their round is long over",
                field=_PARTS_FIELD,
                code="GS_SHARD_LOST",
            )
        return held

    async def _forget_before(self, parts: RoundParts) -> None:
        """Forgets everything that the oldest round and later ones do not need."""
        told = parts.oldest_round, parts.epoch, parts.oldest_step, parts.oldest_epoch
        if self._told == told:
            return
        self._told = told
        home = parts.home_incarnation
        over = [number for number in self._reduced if number < parts.oldest_round]
        gone = [PartKey(home, part_id) for number in over for part_id in self._reduced.pop(number).parts.ids]
        self._averaged.difference_update(gone)
        self._forget_on_disk(gone)
        sums = [step for step in self._running if not _may_need(parts, step)]
        held = [
            key
            for key, part in self._parts.items()
            if part.staged.epoch is not None and not _may_need(parts, part.staged)
        ]
        await self._forget(held, sums)

    async def _forget(self, keys: Collection[PartKey], sums: Collection[Staged] = ()) -> None:
        """Forgets running sums, and gradients except those of rounds that are still being reduced."""
        busy = {part_id for each in self._reducing for part_id in each.parts.ids}
        forgotten = [key for key in keys if key.id not in busy]
        self._forget_on_disk(forgotten)
        discarded = [self._running.pop(step) for step in sums]
        await self._drop(forgotten)
        for each in discarded:
            await each.end()
            each.close()

    def _forget_on_disk(self, keys: Collection[PartKey]) -> None:
        if self._journal is not None:
            self._journal.forget(keys)

    async def _drop(self, keys: Sequence[PartKey]) -> None:
        """Removes gradients at once, and frees their memory in batches, one in each turn of the event loop."""
        dropped = [self._parts.pop(key) for key in keys if key in self._parts]
        for key in keys:
            self._since.pop(key, None)
        async for part in InTurns(dropped):
            part.sum.close()
        self._settle()

    def _settle(self) -> None:
        self._averages.settle(sum(each.nbytes for each in self._reduced.values()))
        self._bookkeeping.settle(0 if self._closed else _PART_BYTES * (len(self._parts) + len(self._staging)))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)


def _may_need(parts: RoundParts, staged: Staged) -> bool:
    return parts.may_need(parts.epoch if staged.epoch is None else staged.epoch, staged.local_step)
