"""The memory in which accumulators keep their values: what every such place offers, the host, and the choice of one."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np

from gradserve_protocol.arrays import converted
from gradserve_server.accumulators.gradient import Array, Gradient, HostCopy, Value
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Allocate, Reducer
from gradserve_server.devices.inventory import NoSuchDeviceError
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.security.identity import Identity
from gradserve_server.storage.journal import Durability

AllocateAverage = Callable[[Sequence[tuple[tuple[int, ...], np.dtype[Any]]]], list[Array]]
"""Returns arrays in host memory; in shared memory if others read averages in place."""


class AverageCopies:
    """The copies of averages between their place and the host; on the host, there are none."""

    def host_copy(self, values: Mapping[str, Value]) -> HostCopy | None:
        """Returns a copy of an average in host memory, made on demand; None if the average is there."""
        return None

    async def brought(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Brings the values of an average from the host to where the accumulator keeps averages.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        return values


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Place(ABC):
    """A memory that accumulators can be in, and the arithmetic there. Holds no state of any accumulator.

    Attributes:
        name: The name of the device, as in `AccumulatorSpec.device`.
        reducer: Computes.
        allocate: Allocates memory.
        compute: Runs the arithmetic.
        has_sparse: Whether sparse components can be here.
        takes_from_anywhere: Whether gradients may be in any memory when they are checked; if not, on the host.
    """

    name: str
    reducer: Reducer
    allocate: Allocate
    compute: Compute

    has_sparse: ClassVar[bool]
    takes_from_anywhere: ClassVar[bool]

    def stage_copy(self, gradient: Gradient) -> tuple[Gradient, Callable[[], bool]]:
        """Allocates a private copy of a gradient that others may change.

        Returns:
            The gradient with new dense values, and the function that fills them; it returns True if it has seen that
            all are finite.

        Raises:
            MemoryError: There is not enough memory.
        """
        copies = {name: self.allocate(value.shape, value.dtype) for name, value in gradient.dense.items()}

        def fill() -> bool:
            return self.reducer.copy(list(gradient.dense.values()), list(copies.values()))

        return Gradient({**gradient.sparse, **copies}, owned=True), fill

    # Memory

    @abstractmethod
    def reserve(self, owner: Identity, container: str | None) -> Reservation:
        """Returns an empty reservation of bytes for an accumulator of an identity in a container."""

    @abstractmethod
    async def grow(self, reservation: Reservation, amount: int, owner: Identity) -> None:
        """Takes more bytes for an accumulator of an identity.

        Raises:
            ResourceExhaustedError: Less than that is left; nothing was taken.
        """

    @abstractmethod
    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work on `num_bytes` of data that allocates memory and can be repeated.

        Raises:
            MemoryError: There is not enough memory.
            ResourceExhaustedError: Likewise.
        """

    @abstractmethod
    def may_be_written(self, array: Array) -> bool:
        """Returns True if an array is not write-protected."""

    @abstractmethod
    def protect(self, array: Array) -> None:
        """Makes an array read-only."""

    # Gradients. These run in any thread.

    @abstractmethod
    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the dense components of a gradient that must be copied before they are added.

        Args:
            gradient: The gradient.
            is_checked: Whether its values are checked first.
        """

    @abstractmethod
    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with these components copied.

        Raises:
            MemoryError: There is not enough memory.
        """

    @abstractmethod
    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array of real numbers in another dtype.

        Raises:
            DoesNotFitError: A finite value would become infinite.
            MemoryError: There is not enough memory.
        """

    @abstractmethod
    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, for messages."""

    # Copies on the host

    @abstractmethod
    def average_copies(self, host_memory: Reservation, allocate: AllocateAverage) -> AverageCopies:
        """Returns the copies of one accumulator's averages on the host.

        Args:
            host_memory: A reservation of the accumulator's owners on the host.
            allocate: Allocates an average's arrays on the host.
        """

    @abstractmethod
    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Reservation
    ) -> AccumulatorJournal:
        """Returns a journal that takes gradients and averages in this place.

        Args:
            journal: A journal that takes them on the host.
            durability: Decides what it writes.
            host_memory: A reservation of the accumulator's owners on the host.
        """


@dataclass(frozen=True)
class HostPlace(Place):
    """The memory of the host.

    Attributes:
        memory: The budget of bytes.
    """

    memory: Budget

    has_sparse = True
    takes_from_anywhere = False

    def reserve(self, owner: Identity, container: str | None) -> Reservation:
        """Returns an empty reservation of bytes for an accumulator."""
        return self.memory.reserve(owner=owner, container=container, purpose=Purpose.ACCUMULATORS)

    async def grow(self, reservation: Reservation, amount: int, owner: Identity) -> None:
        """Takes more bytes."""
        reservation.grow(amount)

    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work; the host repeats none."""
        return await self.compute.run(num_bytes, function, *args, **kwargs)

    def may_be_written(self, array: Array) -> bool:
        """Returns True if an array is not write-protected."""
        return bool(array.flags.writeable)

    def protect(self, array: Array) -> None:
        """Makes an array read-only."""
        array.flags.writeable = False

    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns all components of a live gradient if it is checked: afterwards it must not change."""
        return list(gradient.dense) if gradient.live and is_checked else []

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with copies of all dense values; it knows which are finite, as they were looked at."""
        copied, fill = self.stage_copy(gradient)
        is_finite = fill()
        return replace(copied, finite=frozenset(copied.dense)) if is_finite else copied

    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array of real numbers in another dtype."""
        return converted(array, dtype)

    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, for messages."""
        return array[index]

    def average_copies(self, host_memory: Reservation, allocate: AllocateAverage) -> AverageCopies:
        """Returns copies that do nothing."""
        return AverageCopies()

    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Reservation
    ) -> AccumulatorJournal:
        """Returns the journal itself."""
        return journal


AUTO = "auto"
"""Names the device of the ops, whichever that is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """The places of one server.

    Attributes:
        host: The host.
        device: The device of the ops; None if that is the host.
        default: The name of the place for accumulators that ask for none.

    Raises:
        NoSuchDeviceError: There is no place of the default name.
    """

    host: Place
    device: Place | None = None
    default: str = "cpu"

    def __post_init__(self) -> None:
        if self.find(self.default) is None:
            raise NoSuchDeviceError(
                f"expected a device of this server, {self._names}, got {self.default!r}", "accumulator_device"
            )

    @property
    def _names(self) -> str:
        return ", ".join([each.name for each in (self.host, self.device) if each is not None])

    def find(self, name: str) -> Place | None:
        """Returns the place of this name; None if there is none."""
        if name == AUTO:
            return self.device or self.host
        return next((each for each in (self.host, self.device) if each is not None and each.name == name), None)

    def named(self, spec: AccumulatorSpec) -> AccumulatorSpec:
        """Returns a spec in which AUTO is replaced by the name of a place."""
        if spec.device != AUTO:
            return spec
        is_anywhere = _sparse_component(spec) is None and not spec.num_shards
        return spec.on((self.device if self.device is not None and is_anywhere else self.host).name)

    def of_new(self, spec: AccumulatorSpec) -> Place:
        """Returns the place that a new accumulator asks for, or gets by default.

        Raises:
            InvalidArgumentError: It cannot be there.
        """
        place = self.find(spec.device or self.default)
        if place is None:
            raise InvalidArgumentError(
                f"expected a device of this server, {self._names} or {AUTO}, got {quoted(spec.device or '')}",
                field="spec.device",
            )
        sparse = _sparse_component(spec)
        if place is self.host or not (spec.num_shards or (sparse is not None and not place.has_sparse)):
            return place
        if spec.device is None:
            return self.host
        if spec.num_shards:
            raise InvalidArgumentError(
                f"expected {self.host.name} for a sharded accumulator, got {quoted(spec.device)}", field="spec.device"
            )
        such_as = f", such as {quoted(sparse.name)}" if sparse is not None and sparse.name else ""
        raise InvalidArgumentError(
            f"expected {self.host.name} for an accumulator with sparse components{such_as}, got {quoted(spec.device)}",
            field="spec.device",
        )

    def of_restored(self, spec: AccumulatorSpec, what: str) -> Place:
        """Returns the place of an accumulator of an earlier run: the host if this server lacks its device.

        Sums have the same bits there. Refusing to start would take all other accumulators away, too.
        """
        place = self.find(spec.device or self.host.name)
        if place is None:
            _log.warning("%s was on %s, which this server does not have: it is on the host now", what, spec.device)
        return place or self.host


def _sparse_component(spec: AccumulatorSpec) -> ComponentSpec | None:
    return next((each for each in spec.components if each.is_sparse), None)
