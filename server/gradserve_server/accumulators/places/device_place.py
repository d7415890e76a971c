"""Accumulators in the memory of a device."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from gradserve.wire.arrays import DoesNotFitError, converted, text_of
from gradserve_server.accumulators.gradient import Array, Gradient
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.places.average_copies import AllocateAverage
from gradserve_server.accumulators.places.device_averages import DeviceAverages
from gradserve_server.accumulators.places.device_journal import DeviceJournal
from gradserve_server.accumulators.places.place import Place
from gradserve_server.devices.device import Device
from gradserve_server.devices.reducer import Reducer
from gradserve_server.devices.retry import with_all_memory
from gradserve_server.resources.memory import Purpose
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.security.identity import Identity
from gradserve_server.state.durability import Durability
from gradserve_server.tensors.eviction import Evictor

P = ParamSpec("P")
T = TypeVar("T")


class ConvertingReducer(Reducer, Protocol):
    """A reducer of a device that converts, too."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early once `stop()` is true."""
        ...

    def converted(self, array: Array, dtype: np.dtype[Any]) -> tuple[Array, int | None]:
        """Returns an array rounded to another floating dtype, and the position of the first value that is lost."""
        ...

    def converts(self, dtype: np.dtype[Any]) -> bool:
        """Returns True if arrays of a dtype can be converted."""
        ...


@dataclass(frozen=True)
class DevicePlace(Place):
    """The memory of a device, for dense components; see `Place`.

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

    def part(self, owner: Identity, container: str | None) -> Quota:
        """Returns the quota of bytes of the device for an accumulator."""
        return self.evictor.device.part(Purpose.ACCUMULATORS, owner, container)

    async def grow(self, account: Account, amount: int, owner: Identity) -> None:
        """Takes more bytes; stored tensors that nobody uses move to the host for that."""
        await self.evictor.grow(account, amount, owner)

    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work in a thread; again without what is kept for later, or stored tensors, if memory is lacking."""

        def in_block() -> T:
            # Whatever was going on in memory that is allocated now is over when the block is left: then another thread
            # may write to it.
            with self.device.computing():
                return function(*args, **kwargs)

        def work() -> Awaitable[T]:
            return self.compute.run_in_thread(with_all_memory, self.device, in_block)

        return await self.evictor.attempt(work, num_bytes, owner)

    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the components that are elsewhere; all of a gradient that others may change."""
        return [name for name, value in gradient.dense.items() if gradient.live or not self.device.holds(value)]

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient on the device. What others can change is copied once, and checked there."""
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
        """Returns an element. The whole array is not copied for it."""
        one = np.empty((), array.dtype)
        offset = int(np.ravel_multi_index(index, array.shape)) if index else 0
        with self.device.computing():
            self.device.read(array, offset * array.dtype.itemsize, one)
        return one[()]

    def may_be_written(self, array: Array) -> bool:
        """Returns True: arrays of devices have no such flag, and what may not be written is not adoptable."""
        return True

    def protect(self, array: Array) -> None:
        """Does nothing: see `may_be_written`."""

    def average_copies(self, host_memory: Quota, allocate: AllocateAverage) -> DeviceAverages:
        """Returns what copies averages to the host, and back."""
        return DeviceAverages(self.device, self.compute, self.evictor, host_memory, allocate)

    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Quota
    ) -> AccumulatorJournal:
        """Returns a journal that copies what the other one writes to the host."""
        if durability in (None, Durability.NONE):
            return journal
        return DeviceJournal(journal, durability, self.compute, self._gradient_on_host, host_memory)

    def _gradient_on_host(self, gradient: Gradient) -> Gradient:
        return Gradient({name: self._on_host(value) for name, value in gradient.dense.items()})

    def _on_host(self, array: Array) -> Array:
        with self.device.computing():
            return self.device.to_host(array)
