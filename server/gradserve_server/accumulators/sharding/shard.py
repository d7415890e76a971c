"""What one server has of a sharded accumulator."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gradserve_server.accumulators.gradient import (
    Average,
    Contribution,
    Gradient,
    OpenGradient,
    RoundParts,
    drop,
    sum_of_weights,
)
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.round_sum import RoundSum
from gradserve_server.accumulators.shard_journal import PartKey, ShardJournal
from gradserve_server.accumulators.sharding.running_sum import RunningSum
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import AbortedError, InvalidArgumentError, ServiceError
from gradserve_server.own_tasks import OwnTasks
from gradserve_server.tensors.quotas import Account, Quota

_PART_BYTES = 2048
"""The memory of a gradient that is held, beside its values."""
_PARTS_AT_ONCE = 100
_PARTS_FIELD = "average.parts.part_ids"


@dataclass(eq=False)
class _Part:
    """A gradient that is held: alone in a sum of its own, which counts its memory."""

    local_step: int
    sum: RoundSum


@dataclass(eq=False)
class _Reduced:
    """A round whose average is there, or being computed.

    Attributes:
        parts: What the home has said of it.
        answer: Computes the average.
        nbytes: The memory of the average, once it is there.
    """

    parts: RoundParts
    answer: asyncio.Task[Average]
    nbytes: int = 0


class Shard:
    """Holds what gradients have of some components, and averages those that the accumulator's home names.

    All of it is of one incarnation of the accumulator at its home. It decides nothing. A gradient that is held has no
    effect until somebody who knows the home's decision asks for the average of its round. Then all who ask for that
    round get the same average, whichever other gradients are there. What no round needs any more is forgotten, as the
    home's decisions say.

    Lives on one event loop; threads do the arithmetic.
    """

    def __init__(
        self,
        name: str,
        spec: AccumulatorSpec,
        *,
        make_sum: Callable[[], RoundSum],
        make_running_sum: Callable[[], RoundSum] | None,
        memory: Quota,
        bookkeeping: Quota,
        journal: ShardJournal,
    ) -> None:
        """Takes its parts.

        Args:
            name: The accumulator's name, for messages.
            spec: What this server has of the accumulator.
            make_sum: Makes a sum for that, of gradients in an order that is asked for.
            make_running_sum: Makes a sum of gradients as they arrive; None if they must be held.
            memory: The quota of bytes of averages.
            bookkeeping: The quota of bytes of what is kept beside tensors.
            journal: Takes the gradients that are held.
        """
        self.sum_spec = spec
        """What this server has of the accumulator."""
        self._name = name
        self._make_sum = make_sum
        self._make_running_sum = make_running_sum
        self._journal = journal
        self._averages = Account(memory)
        self._bookkeeping = Account(bookkeeping)
        self._place = make_sum().place
        self._parts: dict[PartKey, _Part] = {}
        self._running: dict[int, RunningSum] = {}
        """By their local steps."""
        self._staging: dict[PartKey, asyncio.Task[None]] = {}
        self._reduced: dict[int, _Reduced] = {}
        """By the numbers of the rounds."""
        self._averaged: set[PartKey] = set()
        """The gradients in these rounds, which need not be held again."""
        self._oldest: tuple[int, int] | None = None
        """The oldest round and step that were heard of."""
        self._tasks = OwnTasks()
        self._closed: ServiceError | None = None

    @property
    def place(self) -> Place:
        """Where its gradients and averages are."""
        return self._place

    @property
    def num_parts(self) -> int:
        """The number of gradients that it holds."""
        return len(self._parts)

    @property
    def num_bytes(self) -> int:
        """The memory of the gradients that it holds, and of its averages."""
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
    ) -> bool:
        """Holds a gradient; returns whether it was there already. Once it has begun, nobody can cancel it.

        Args:
            key: Its name.
            local_step: The step at which it was computed.
            open_gradient: Opens it.
            weight: Its weight.
            can_stage_again: Whether its client keeps it, so that it need not be held: then it is added to others at
                once if it is in memory of the client, which would have to be copied.
            is_sum: Whether it is a sum of gradients, whose values are in the dtypes of the sums. It is always held: if
                the client is killed, nobody has the sum any more.

        Raises:
            InvalidArgumentError: The gradient is not valid here; nothing has changed.
            ServiceError: `open_gradient` failed, or a limit was reached; nothing has changed.
        """
        self._check_open()
        under_way = self._staging.get(key)
        running = self._running.get(local_step)
        is_there = key in self._parts or key in self._averaged or (running is not None and key.id in running.weights)
        if is_there or under_way is not None:
            if under_way is not None:
                try:
                    await asyncio.shield(under_way)
                except AbortedError as error:
                    if not error.caller_left:
                        raise
                    # The first caller, that is: this one brings the gradient again.
                    return await self.stage(
                        key, local_step, open_gradient, weight=weight, can_stage_again=can_stage_again, is_sum=is_sum
                    )
            await open_gradient(drop)
            return True
        weight_if_kept = weight if can_stage_again and not is_sum else None
        task = self._tasks.begin(self._stage(key, local_step, open_gradient, weight_if_kept, is_sum=is_sum))
        self._staging[key] = task
        task.add_done_callback(lambda _: self._staging.pop(key, None))
        await asyncio.shield(task)
        return False

    async def stage_again(self, key: PartKey, local_step: int, gradient: Gradient) -> None:
        """Holds a gradient that was held before the server was started again.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        dtypes = {name: value.dtype for name, value in gradient.dense.items()}
        is_sum = any(dtypes[each.name] != each.dtype for each in self.sum_spec.dense_components)
        self._hold(key, await self._held(local_step, gradient, None, is_sum=is_sum))

    async def reduce(self, decided: Average) -> Average:
        """Returns what this server has of an average.

        Args:
            decided: What the home has answered: an average without values.

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
            known = self._reduced[number] = _Reduced(parts, self._tasks.begin(self._reduce(decided, parts)))
        elif (known.parts.ids, known.parts.weights, known.parts.sums) != (parts.ids, parts.weights, parts.sums):
            raise InvalidArgumentError(
                f"expected the gradients with which round {number + 1} of accumulator {self._name!r} was reduced here, "
                f" {len(known.parts.ids)} of them, got {len(parts.ids)} others",
                field=_PARTS_FIELD,
            )
        average = await asyncio.shield(known.answer)
        await self._forget_before(parts)
        return average

    def close(self, error: ServiceError) -> None:
        """Refuses later calls with `error`, and frees the memory."""
        self._closed = error
        for each in self._sums:
            each.close()
        self._parts.clear()
        self._running.clear()
        self._reduced.clear()
        self._averaged.clear()
        self._settle()

    async def _stage(
        self,
        key: PartKey,
        local_step: int,
        open_gradient: OpenGradient,
        weight_if_kept: float | None,
        *,
        is_sum: bool,
    ) -> None:
        async def hold(given: Gradient) -> None:
            if weight_if_kept is not None and await self._added(key, local_step, given, weight_if_kept):
                return
            part = await self._held(local_step, given, key, is_sum=is_sum)
            if self._closed is not None:
                part.sum.close()
                raise self._closed
            self._hold(key, part)
            self._settle()

        await open_gradient(hold)

    def _hold(self, key: PartKey, part: _Part) -> None:
        self._parts[key] = part

    async def _added(self, key: PartKey, local_step: int, given: Gradient, weight: float) -> bool:
        """Adds a gradient to others of its step; returns False if it has to be held."""
        if self._make_running_sum is None or not given.live:
            return False
        running = self._running.get(local_step)
        if running is None:
            running = self._running[local_step] = RunningSum(self._make_running_sum())
        return await running.add(key.id, weight, given, self._check_rows)

    async def _held(self, local_step: int, given: Gradient, key: PartKey | None, *, is_sum: bool) -> _Part:
        """Returns a gradient in a sum of its own, once it is on disk under its key, if it has one."""
        own = self._make_sum()
        self._bookkeeping.grow(_PART_BYTES)
        try:
            gradient = await own.check(given, joins=False, is_sum=is_sum)
            self._check_rows(gradient)
            staged = await own.stage(gradient, Contribution())
            try:
                given.check_lenders()
                if key is not None:
                    written = await self._journal.accept(key, local_step, gradient)
                    if written is not None:
                        await written
            except BaseException:
                own.settle()
                raise
            await own.commit(staged)
        except BaseException:
            self._settle()
            raise
        finally:
            await own.finish()
        return _Part(local_step, own)

    def _check_rows(self, gradient: Gradient) -> None:
        """Checks that rows have the component's sizes: those of a round must go together, and nobody else compares."""
        for component in self.sum_spec.components:
            if component.is_sparse and component.shape.dims is not None:
                sizes, expected = gradient.sparse[component.name].values.shape[1:], component.shape.dims[1:]
                if sizes != expected:
                    raise InvalidArgumentError(
                        f"expected rows of shape {list(expected)}, got {list(sizes)}",
                        field=f"{component.field}.sparse.values.shape",
                    )

    async def _reduce(self, decided: Average, parts: RoundParts) -> Average:
        try:
            average = await self._reduced_average(decided, parts)
        except BaseException:
            self._reduced.pop(decided.round_number, None)  # it may succeed later
            raise
        self._reduced[decided.round_number].nbytes = average.nbytes
        members = [PartKey(parts.home_incarnation, each) for each in parts.ids]
        self._averaged.update(members)
        await self._drop(members)
        return average

    async def _reduced_average(self, decided: Average, parts: RoundParts) -> Average:
        step = await self._step_of_running(decided, dict(zip(parts.ids, parts.weights, strict=True)))
        added = () if step is None else self._running[step].weights
        contributions = {
            part_id: contribution for part_id, contribution in parts.contributions.items() if part_id not in added
        }
        held = self._members(decided, parts.home_incarnation, contributions)
        total = self._make_sum() if step is None else self._running.pop(step).sum
        try:
            if step is None:
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

    async def _step_of_running(self, decided: Average, weights: Mapping[str, float]) -> int | None:
        """Ends the running sum that has gradients of a round; returns its local step, None if there is none.

        Raises:
            AbortedError: It has others, too, or is not the only one: they are of no use, and gone now.
        """
        found = [step for step, each in self._running.items() if not weights.keys().isdisjoint(each.weights)]
        for step in found:
            await self._running[step].end()  # one more may have been under way
        if not found or (len(found) == 1 and self._running[found[0]].weights.items() <= weights.items()):
            return found[0] if found else None
        for step in found:
            self._running.pop(step).close()
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
            )
        return held

    async def _forget_before(self, parts: RoundParts) -> None:
        """Forgets what no round from the oldest one on needs."""
        oldest = parts.oldest_round, parts.oldest_step
        if self._oldest == oldest:
            return
        self._oldest = oldest
        rounds = [number for number in self._reduced if number < parts.oldest_round]
        for step in [step for step in self._running if step < parts.oldest_step]:
            self._running.pop(step).close()
        home = parts.home_incarnation
        gone = [PartKey(home, part_id) for number in rounds for part_id in self._reduced.pop(number).parts.ids]
        unneeded = [key for key, part in self._parts.items() if part.local_step < parts.oldest_step]
        self._averaged.difference_update(gone)
        if gone or unneeded:
            self._journal.forget([*gone, *unneeded])
            await self._tasks.finish(self._drop(unneeded))

    async def _drop(self, keys: Sequence[PartKey]) -> None:
        """Frees the memory of gradients, a few in each turn of the event loop."""
        for start in range(0, len(keys), _PARTS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            for key in keys[start : start + _PARTS_AT_ONCE]:
                part = self._parts.pop(key, None)
                if part is not None:
                    part.sum.close()
        self._settle()

    def _settle(self) -> None:
        self._averages.settle(sum(each.nbytes for each in self._reduced.values()))
        self._bookkeeping.settle(0 if self._closed else _PART_BYTES * (len(self._parts) + len(self._staging)))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)
