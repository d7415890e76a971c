"""The memory of a device as a place of accumulators, with the copies on the host that readers and the disk need."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from gradserve_protocol.arrays import DoesNotFitError, converted, text_of
from gradserve_server.accumulators.gradient import Array, Average, Gradient, HostCopy, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.ledger import Event, GradientAnswered
from gradserve_server.accumulators.places.place import AllocateAverage, AverageCopies, Place
from gradserve_server.accumulators.rounds import SeenRound
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Device, Reducer, with_all_memory
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Purpose, Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks
from gradserve_server.security.identity import Identity
from gradserve_server.storage.journal import Durability
from gradserve_server.tensors.eviction import Evictor


class DeviceAverages(AverageCopies):
    """Copies the averages of an accumulator on a device to the host, and back after a restart."""

    def __init__(
        self, device: Device, compute: Compute, evictor: Evictor, memory: Reservation, allocate: AllocateAverage
    ) -> None:
        """Takes the device and the memory of both sides.

        Args:
            device: The device.
            compute: Runs copies.
            evictor: Makes room in the device's memory.
            memory: The budget of bytes on the host.
            allocate: Allocates memory there.
        """
        self._device = device
        self._compute = compute
        self._evictor = evictor
        self._memory = memory
        self._allocate = allocate

    def host_copy(self, values: Mapping[str, Value]) -> HostCopy:
        """Returns a copy of an average in host memory, made on demand."""
        return SharedHostCopy(values, self._compute, self._to_host, self._memory.another(), self._evictor)

    async def brought(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Returns the values of an average on the device; see `AverageCopies`."""
        try:
            return await self._compute.run_in_thread(with_all_memory, self._device, self._to_device, values)
        except MemoryError as error:
            raise ResourceExhaustedError(
                "the device has no memory left for this average", code="GS_NO_MEMORY"
            ) from error

    def _to_host(self, values: Mapping[str, Array]) -> dict[str, Value]:
        arrays = self._allocate([(value.shape, value.dtype) for value in values.values()])
        with self._device.computing():
            for value, array in zip(values.values(), arrays, strict=True):
                self._device.read(value, 0, array)
        for array in arrays:
            array.flags.writeable = False
        return dict(zip(values, arrays, strict=True))

    def _to_device(self, values: Mapping[str, Any]) -> Mapping[str, Value]:
        with self._device.computing():
            return {name: self._device.from_host(value) for name, value in values.items()}


class SharedHostCopy:
    """A copy of one average in host memory, made on first demand and shared by all readers: a `HostCopy`.

    Counts in the budget until `close`. A reader that asks later, because its reply was still pending, gets a copy that
    counts only while it is made. Used on the event loop only.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        compute: Compute,
        copy: Callable[[Mapping[str, Array]], dict[str, Value]],
        reservation: Reservation,
        evictor: Evictor,
    ) -> None:
        """Takes the values and the means to copy them.

        Args:
            values: The values on the device.
            compute: Runs the copying.
            copy: Copies the values to the host.
            reservation: An empty reservation of the host's memory.
            evictor: Makes room in the device's memory.
        """
        self._values = values
        self._compute = compute
        self._copy = copy
        self._reservation = reservation
        self._evictor = evictor
        self._copying: asyncio.Task[Mapping[str, Value]] | None = None
        self._tasks = BackgroundTasks()
        self._is_closed = False

    @property
    def _num_bytes(self) -> int:
        return sum([value.nbytes for value in self._values.values()])

    async def reserve(self, reservation: Reservation, owner: Identity) -> None:
        """Reserves device memory for handles of the values; unused stored tensors make room for them."""
        await self._evictor.grow(reservation, self._num_bytes, owner)

    async def values(self) -> Mapping[str, Value]:
        """Returns the values in host memory. If the caller is cancelled, others still get them.

        Raises:
            ResourceExhaustedError: There is not enough memory on the host; a later call tries again.
        """
        if self._copying is None:
            self._reservation.grow(self._num_bytes)
            self._copying = self._tasks.begin(self._copied())
        return await asyncio.shield(self._copying)

    async def _copied(self) -> Mapping[str, Value]:
        try:
            copied = await self._compute.run_in_thread(self._copy, self._values)
        except BaseException as error:
            self._forget()
            if isinstance(error, MemoryError):
                raise ResourceExhaustedError(
                    "the server has no memory left for a copy of this average", code="GS_NO_MEMORY"
                ) from error
            raise
        if self._is_closed:
            self._forget()
        return copied

    def close(self) -> None:
        """Frees the memory of an average that nobody will ask for again."""
        self._is_closed = True
        if self._copying is not None and self._copying.done():
            self._forget()

    def _forget(self) -> None:
        self._copying = None
        self._reservation.settle(0)


class DeviceJournal:
    """The journal of an accumulator on a device: copies to the host what another journal writes, and nothing else.

    Readers share the copy of an average that is made for the disk.
    """

    def __init__(
        self,
        journal: AccumulatorJournal,
        durability: Durability | None,
        compute: Compute,
        to_host: Callable[[Gradient], Gradient],
        memory: Reservation,
    ) -> None:
        self._journal = journal
        self._writes_gradients = durability is Durability.GRADIENT
        self._compute = compute
        self._to_host = to_host
        self._memory = memory
        self._reserved = memory.another()
        """Counts the copy of the average of a round that is about to end."""

    async def append(self, event: Event) -> None:
        """Appends an event; if that fails, gives back the memory for the average."""
        try:
            await self._journal.append(event)
        except BaseException:
            self._reserved.settle(0)  # the round does not end
            raise

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Copies a gradient to the host if it is to be written."""
        if not self._writes_gradients:
            return await self._journal.accept(event, gradient)
        copied = self._memory.another()
        copied.grow(gradient.nbytes)
        try:
            on_host = await self._compute.run_in_thread(self._to_host, gradient)
            written = await self._journal.accept(event, on_host)
        except BaseException as error:
            copied.settle(0)
            if isinstance(error, MemoryError):
                raise ResourceExhaustedError(
                    "the server has no memory left to write this gradient", code="GS_NO_MEMORY"
                ) from error
            raise
        if written is None:
            copied.settle(0)
        else:
            written.add_done_callback(lambda _: copied.settle(0))
        return written

    async def reserve(self, num_bytes: int) -> None:
        """Reserves memory on the host for the copy of an average, too."""
        self._reserved.settle(0)
        self._reserved.grow(num_bytes)
        try:
            await self._journal.reserve(num_bytes)
        except BaseException:
            self._reserved.settle(0)
            raise

    async def settle(self, average: Average, answered: Sequence[RequestId], seen: SeenRound | None = None) -> None:
        """Settles the copy of an average on the host."""
        self._reserved.settle(0)  # taken again at once
        try:
            await self._journal.settle(await average.on_host(), answered, seen)
        except BaseException:
            average.release()
            raise


P = ParamSpec("P")
T = TypeVar("T")


class ConvertingReducer(Reducer, Protocol):
    """A reducer of a device that can also convert dtypes."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early once `stop()` is true."""
        ...

    def converted(self, array: Array, dtype: np.dtype[Any]) -> tuple[Array, int | None]:
        """Returns an array rounded to another floating dtype, and the position of the first value that overflows."""
        ...

    def converts(self, dtype: np.dtype[Any]) -> bool:
        """Returns True if arrays of a dtype can be converted."""
        ...


@dataclass(frozen=True)
class DevicePlace(Place):
    """The memory of a device, for dense components.

    Attributes:
        reducer: Computes there.
        compute: Runs everything that is done on the device, none of it on the event loop.
        device: The device.
        evictor: Makes room in its memory.
    """

    reducer: ConvertingReducer
    device: Device
    evictor: Evictor

    has_sparse = False
    takes_from_anywhere = True

    def reserve(self, owner: Identity, container: str | None) -> Reservation:
        """Returns an empty reservation of bytes of the device."""
        return self.evictor.device.reserve(owner=owner, container=container, purpose=Purpose.ACCUMULATORS)

    async def grow(self, reservation: Reservation, amount: int, owner: Identity) -> None:
        """Takes more bytes; unused stored tensors move to the host to make room."""
        await self.evictor.grow(reservation, amount, owner)

    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work in a thread; if memory is lacking, frees caches and then stored tensors, and repeats it."""

        def in_block() -> T:
            # When the block ends, all earlier work in newly allocated memory is over: other threads may write there.
            with self.device.computing():
                return function(*args, **kwargs)

        def work() -> Awaitable[T]:
            return self.compute.run_in_thread(with_all_memory, self.device, in_block)

        return await self.evictor.attempt(work, num_bytes, owner)

    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the components that are elsewhere; all of a live gradient."""
        return [name for name, value in gradient.dense.items() if gradient.live or not self.device.holds(value)]

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient on the device. Live values are copied once, and checked there."""
        copied = set(self.copied(gradient, is_checked=False))
        with self.device.computing():
            values = {name: self._copy(value) if name in copied else value for name, value in gradient.dense.items()}
        finite = frozenset[str]() if gradient.live else gradient.finite
        return Gradient(values, owned=len(copied) == len(values), finite=finite)

    def _copy(self, array: Array) -> Array:
        copy: Array
        if not self.device.holds(array):
            copy = self.device.from_host(array)
            return copy
        copy = self.allocate(array.shape, array.dtype)
        self.reducer.scale([array], 1.0, [copy])
        return copy

    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array in another dtype, on the device if it is there and its dtype is a floating one."""
        if not self.device.holds(array):
            return converted(array, dtype)
        if not self.reducer.converts(array.dtype):
            return converted(self._on_host(array), dtype)
        result, lost = self.reducer.converted(array, dtype)
        if lost is not None:
            index = tuple(map(int, np.unravel_index(lost, array.shape)))
            raise DoesNotFitError(text_of(self.element(array, index), index, dtype))
        return result

    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, without copying the whole array."""
        one = np.empty((), array.dtype)
        offset = int(np.ravel_multi_index(index, array.shape)) if index else 0
        with self.device.computing():
            self.device.read(array, offset * array.dtype.itemsize, one)
        return one[()]

    def may_be_written(self, array: Array) -> bool:
        """Returns True: arrays of devices have no such flag, and read-only ones are not adoptable."""
        return True

    def protect(self, array: Array) -> None:
        """Does nothing: see `may_be_written`."""

    def average_copies(self, host_memory: Reservation, allocate: AllocateAverage) -> DeviceAverages:
        """Returns the copies of averages on the host."""
        return DeviceAverages(self.device, self.compute, self.evictor, host_memory, allocate)

    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Reservation
    ) -> AccumulatorJournal:
        """Returns a journal that copies to the host what the other one writes."""
        return DeviceJournal(journal, durability, self.compute, self._gradient_on_host, host_memory)

    def _gradient_on_host(self, gradient: Gradient) -> Gradient:
        return Gradient({name: self._on_host(value) for name, value in gradient.dense.items()})

    def _on_host(self, array: Array) -> Array:
        with self.device.computing():
            return self.device.to_host(array)
