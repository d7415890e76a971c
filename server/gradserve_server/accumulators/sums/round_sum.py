"""The sum of the current round: checks gradients, adds them up within the budgets, and averages them."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

from gradserve_server.accumulators.gradient import Array, Contribution, Gradient, SparseSlices, Value
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec, DType
from gradserve_server.accumulators.sums.checking import Check
from gradserve_server.accumulators.sums.packed import WORK, check_packed, unpacked, unpacked_bytes
from gradserve_server.accumulators.sums.summation import Staged, Summation, WorkerOrderSum, make_summation
from gradserve_server.devices.compute import INLINE_BYTES, PIECE_BYTES
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Reservation
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.storage.journal import Durability

P = ParamSpec("P")
T = TypeVar("T")

_COMPONENT_WORK = PIECE_BYTES // 4
"""The work of a step for one component, whatever its size, in bytes of element-wise work."""


class AverageMemory(Protocol):
    """Allocates averages where workers on this machine read them in place.

    Attributes:
        takes_sums: Whether gradients may be added up there, too, which takes less memory and time. Readers of an
            average may then see sums that are not finished.
    """

    @property
    def takes_sums(self) -> bool: ...

    def arrays(self, specs: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array] | None:
        """Returns writable C-contiguous arrays in one block of memory, or None if nobody would read them in place.

        The accumulator writes them once, and makes them read-only. Called in any thread.

        Args:
            specs: The shape and dtype of each array.

        Raises:
            MemoryError: There is not enough memory. The sums are divided in place then.
            ResourceExhaustedError: A budget is used up; likewise.
        """
        ...


Shapes = dict[str, tuple[int, ...]]
"""The shape of the values of each component."""


@dataclass(frozen=True, slots=True)
class StagedGradient:
    """A checked gradient, ready to be added to a round.

    Attributes:
        gradient: The gradient in the accumulator's place and dtypes, without its lenders. They are asked when all has
            been read that is read before the gradient counts.
        addition: Its addition.
        shapes: If it is the first of its round, the shapes that later ones must have.
        is_in_average_memory: If it is the first, whether the sum is where the average will be read.
    """

    gradient: Gradient
    addition: Staged[None]
    shapes: Shapes | None
    is_in_average_memory: bool


class RoundSum:
    """Does the arithmetic of an accumulator in two steps: `stage` can fail, `commit` cannot.

    Nothing has changed between the two, so that a journal can record the change first. Calls come one at a time, on the
    event loop; large work runs in threads, and whatever is done on a device.

    Attributes:
        spec: The spec of what is summed.
        place: Where the sum is.
        owner: Whose it is.
        summation: The arithmetic.
    """

    def __init__(
        self,
        spec: AccumulatorSpec,
        place: Place,
        summation: Summation | None = None,
        *,
        memory: Reservation,
        owner: Identity = ANONYMOUS,
        make_room: Callable[[], bool] = lambda: False,
        average_memory: AverageMemory | None = None,
    ) -> None:
        """Takes the place, and the accumulator's part of its memory.

        Args:
            spec: The accumulator's spec.
            place: Where the sum is.
            summation: The arithmetic; None for the one that the spec asks for.
            memory: The budget of bytes there.
            owner: Whose accumulator it is.
            make_room: Called when the budget is used up; frees some memory, or returns False.
            average_memory: Allocates averages that others read in place; None if nobody does.
        """
        self.spec = spec
        self._dense = spec.dense_components
        self._least_work = _COMPONENT_WORK * len(spec.components)
        self.place = place
        self.summation = summation or make_summation(spec, place)
        self._compute = place.compute
        self._reservation = memory.another()
        self._copied = memory.another()
        self.owner = owner
        self._make_room = make_room
        self._average_memory = average_memory
        self._sums_there = (
            average_memory is not None
            and average_memory.takes_sums
            and len(self._dense) > 0
            and self.summation.divides_in_place
        )
        self._is_in_average_memory = False
        self._shapes: Shapes | None = self.summation.shapes
        self._is_unfinished = False
        self._closed = False

    @property
    def nbytes(self) -> int:
        """The memory of the sum, or of the gradients held for it."""
        return self._reservation.used

    async def check(self, gradient: Gradient, contribution: Contribution, *, joins: bool) -> Gradient:
        """Checks a gradient; returns it with values in the components' dtypes, and without its lenders.

        Memory of copies that were needed for the check counts until `finish`, or for the sum.

        Args:
            gradient: The gradient.
            contribution: Says whether it is a sum of gradients, whose values are in the dtypes of the sums.
            joins: Whether it must have the shapes of the round rather than those of the spec.

        Raises:
            InvalidArgumentError: The shapes or values do not fit.
            ResourceExhaustedError: There is not enough memory.
        """
        is_wide = bool(contribution.sum_of or gradient.packed or gradient.is_wide)
        spec = self.spec.of_sums if is_wide else self.spec
        memory, packed = gradient.memory, gradient.packed
        if packed:
            await self._run(WORK * gradient.nbytes, check_packed, self.spec, packed)
            if not self.summation.takes_packed or self.spec.durability is Durability.GRADIENT:
                gradient = await self._unpacked(gradient)
                memory, packed = (*memory, self._copied), {}
        if len(gradient.values) < len(spec.components):
            spec = spec.only(gradient.values)
        check = await self._pass(Check.of, spec, gradient, self.place)
        num_bytes = check.copied_bytes
        if num_bytes:
            await self._make_room_for(lambda: self.place.grow(self._copied, num_bytes, self.owner))
            memory = (self._copied,)
        checked = await self._run(check.work, check.checked, self._shapes if joins else None)
        if checked.lenders:
            checked = replace(checked, lenders=())
        if is_wide:
            checked = replace(checked, packed=packed, is_wide=True)
        return checked if memory is gradient.memory else replace(checked, memory=memory)

    async def _unpacked(self, gradient: Gradient) -> Gradient:
        """Returns a gradient whose packed components were checked as arrays, whose memory counts until `finish`."""
        dtypes = self.spec.dense_sum_dtypes
        num_bytes = unpacked_bytes(gradient.packed, dtypes)
        await self._make_room_for(lambda: self.place.grow(self._copied, num_bytes, self.owner))
        return await self._run(num_bytes, unpacked, gradient, dtypes, self.place)

    async def stage(self, gradient: Gradient, contribution: Contribution) -> StagedGradient:
        """Checks a gradient and prepares its addition: reserves memory, and does the part that can fail.

        If it is not committed, `settle` gives the memory back.

        Raises:
            InvalidArgumentError: The shapes or values do not fit; nothing has changed.
            ResourceExhaustedError: There is not enough memory; nothing has changed.
        """
        return await self._stage(await self.check(gradient, contribution, joins=True), contribution)

    async def _stage(self, gradient: Gradient, contribution: Contribution) -> StagedGradient:
        growth = await self._pass(self.summation.growth, gradient)
        if growth:
            await self._make_room_for(lambda: self.place.grow(self._reservation, growth, self.owner))
        if gradient.is_adoptable:
            await self._expect(gradient)
        shapes = memory = None
        if self._shapes is None:
            shapes = await self._pass(_shapes_of, gradient)
            if self._sums_there and not gradient.is_adoptable:
                memory = await self._pass(self._memory_to_read_in_place, shapes)
        try:
            addition = await self._run(gradient.sparse_work, self.summation.stage, gradient, contribution, memory)
        except BaseException:
            self.settle()
            raise
        return StagedGradient(gradient, addition, shapes, is_in_average_memory=memory is not None)

    async def commit(self, staged: StagedGradient) -> None:
        """Carries out a staged addition, all but what `finish` does: the end of the round may do it with less work."""
        self._is_unfinished = True
        try:
            await self._compute.run(max(staged.addition.work, self._least_work), staged.addition.commit)
        finally:
            self.settle(staged.gradient.memory)
        if staged.shapes is not None:
            self._shapes, self._is_in_average_memory = staged.shapes, staged.is_in_average_memory

    async def stage_average(self, total_weight: float) -> Staged[dict[str, Value]]:
        """Prepares the result of the round. Its memory counts here until `settle`.

        Raises:
            ResourceExhaustedError: There is not enough memory; nothing has changed.
        """
        memory = await self.reserve_result()
        try:
            return await self._run(self.summation.averaging_work, self.summation.stage_average, total_weight, memory)
        except BaseException:
            self.settle()
            raise

    async def commit_average(self, staged: Staged[dict[str, Value]]) -> dict[str, Value]:
        """Returns the result of the round, and begins the next one."""
        self._shapes = self.summation.shapes
        return await self._compute.run(max(staged.work, self._least_work), staged.commit)

    def drop(self) -> None:
        """Begins the next round without a result of this one."""
        self.summation.drop()
        self._shapes = self.summation.shapes
        self.settle()

    async def finish(self) -> None:
        """Carries out what is left of an addition. From then on its gradient is no longer used."""
        try:
            if self._is_unfinished:
                await self._compute.run(max(self.summation.pending_work, self._least_work), self.summation.finish)
                self._is_unfinished = False
        finally:
            if self._copied.used:
                self._copied.settle(0)

    @property
    def held(self) -> Sequence[Gradient]:
        """The gradients of a deterministic sum."""
        return _in_order(self).held

    async def borrow(self, others: Sequence["RoundSum"], contributions: Collection[Contribution]) -> None:
        """Holds the gradients of other sums, of which each has one, to average them in the order of their sequences.

        They count the memory of the gradients, and stay open until the average is there. All are deterministic.
        """
        self._shapes = others[0]._shapes

        def borrow() -> None:
            _in_order(self).borrow([gradient for each in others for gradient in _in_order(each).held], contributions)

        await self._compute.run(PIECE_BYTES * len(others), borrow)

    async def add_of(self, other: "RoundSum", contribution: Contribution) -> None:
        """Adds the gradient of another sum, which is deterministic and has one, and which counts its memory.

        Raises:
            ResourceExhaustedError: There is not enough memory; nothing has changed.
        """
        (gradient,) = _in_order(other).held
        await self.commit(await self._stage(replace(gradient, owned=False, memory=()), contribution))

    def settle(self, givers: Sequence[Reservation] = ()) -> None:
        """Sets the memory counted for the sum to what it uses now.

        Args:
            givers: The reservations that count the memory it may have taken over; from now on it is counted here alone.
        """
        nbytes = 0 if self._closed else self.summation.nbytes
        for giver in givers:
            # Checked by `stage`.
            grown = max(nbytes - self._reservation.used, 0)
            taken = min(giver.used, grown)
            giver.settle(giver.used - taken)
            self._reservation.settle(self._reservation.used + taken)
        self._reservation.settle(nbytes)

    def close(self) -> None:
        """Frees the memory, including that of additions under way."""
        self._closed = True
        self.settle()

    async def reserve_result(self) -> list[Array] | None:
        """Reserves memory for the result of a round; it counts here until `settle`.

        Returns:
            The arrays of the dense components, where others read them in place; None if those of the sums must do.

        Raises:
            ResourceExhaustedError: There is not enough memory; nothing has changed.
        """
        memory = None
        if self._dense and self._shapes is not None and not self._is_in_average_memory:
            memory = await self._pass(self._memory_to_read_in_place, self._shapes)
        in_place = 0 if memory is None else sum([each.nbytes for each in memory])
        beside = self.summation.result_nbytes
        if beside:
            await self._make_room_for(lambda: self.place.grow(self._reservation, max(beside, in_place), self.owner))
        elif in_place:
            try:
                self._reservation.grow(in_place)
            except ResourceExhaustedError:
                return None
        return memory

    def _memory_to_read_in_place(self, shapes: Shapes) -> list[Array] | None:
        if self._average_memory is None:
            return None
        try:
            return self._average_memory.arrays([(shapes[each.name], each.dtype) for each in self._dense])
        except (MemoryError, ResourceExhaustedError):
            return None

    async def _expect(self, gradient: Gradient) -> None:
        """Makes sure that the owners of this sum may hold the memory of a gradient that it takes over."""
        num_bytes = await self._pass(self.summation.adopted, gradient)
        if not num_bytes:
            return
        try:
            await self._make_room_for(lambda: self._ask_owners(num_bytes, gradient.memory))
        except BaseException:
            self.settle()
            raise

    async def _ask_owners(self, num_bytes: int, givers: Sequence[Reservation]) -> None:
        self._reservation.expect(num_bytes, givers)

    async def _make_room_for(self, reserve: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await reserve()
            except ResourceExhaustedError:
                if not self._make_room():
                    raise

    async def _pass(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function that goes through all components, whose values it does not read: at once if they are few."""
        if self._least_work <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await self._run(0, function, *args, **kwargs)

    async def _run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            work = max(num_bytes, self._least_work)
            return await self.place.attempt(work, self.owner, function, *args, **kwargs)
        except MemoryError as error:
            raise ResourceExhaustedError(
                "the server has no memory left for this gradient or average", code="GS_NO_MEMORY"
            ) from error


def _in_order(sum_: RoundSum) -> WorkerOrderSum:
    assert isinstance(sum_.summation, WorkerOrderSum), "its spec is deterministic"
    return sum_.summation


def _shapes_of(gradient: Gradient) -> Shapes:
    """Returns the shapes that later gradients of the round must have."""
    return {
        name: value.values.shape if isinstance(value, SparseSlices) else value.shape
        for name, value in gradient.values.items()
    }
