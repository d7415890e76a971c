"""Where the values of an accumulator are, and what computes on them there."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np

from gradserve.wire.arrays import converted
from gradserve_server.accumulators.gradient import Array, Gradient, HostCopy, Value
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Allocate, Reducer
from gradserve_server.devices.inventory import NoSuchDeviceError
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.security.identity import Identity
from gradserve_server.storage.journal import Durability

AllocateAverage = Callable[[Sequence[tuple[tuple[int, ...], np.dtype[Any]]]], list[Array]]
"""Returns arrays in host memory, where others read them in place if there are such readers."""


class AverageCopies:
    """Copies the averages of an accumulator on the host: there is nothing to copy."""

    def host_copy(self, values: Mapping[str, Value]) -> HostCopy | None:
        """Returns the copy of an average in host memory, not made yet; None if it is there already."""
        return None

    async def brought(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Returns the values of an average, which are on the host, where averages of this accumulator are.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        return values


class PrivateCopies:
    """Copies live gradients, for whatever must not change any more."""

    def __init__(self, reducer: Reducer, allocate: Allocate) -> None:
        """Takes what copies, and what allocates memory."""
        self._reducer = reducer
        self._allocate = allocate

    def stage(self, gradient: Gradient) -> tuple[Gradient, Callable[[], None]]:
        """Prepares a copy of the dense values; returns the gradient with it, and the function that carries it out.

        Raises:
            MemoryError: There is not enough memory.
        """
        copies = {name: self._allocate(value.shape, value.dtype) for name, value in gradient.dense.items()}

        def fill() -> None:
            self._reducer.scale(list(gradient.dense.values()), 1.0, list(copies.values()))

        return Gradient({**gradient.sparse, **copies}, owned=True), fill

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with copies of the dense values.

        Raises:
            MemoryError: There is not enough memory.
        """
        copied, fill = self.stage(gradient)
        fill()
        return copied


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Place(ABC):
    """Memory in which accumulators are, and what computes there. It has nothing of any of them.

    Attributes:
        name: The name of the device, as in `AccumulatorSpec.device`.
        reducer: Computes.
        allocate: Allocates memory.
        compute: Runs the arithmetic.
        has_sparse: Whether sparse components can be here.
        takes_from_anywhere: Whether gradients may be in any memory when they are checked; otherwise they are on the
            host.
    """

    name: str
    reducer: Reducer
    allocate: Allocate
    compute: Compute

    has_sparse: ClassVar[bool]
    takes_from_anywhere: ClassVar[bool]

    @property
    def copies(self) -> PrivateCopies:
        """Copies gradients that others may change."""
        return PrivateCopies(self.reducer, self.allocate)

    # Memory

    @abstractmethod
    def part(self, owner: Identity, container: str | None) -> Quota:
        """Returns the quota of bytes for an accumulator; see `Quota.part`."""

    @abstractmethod
    async def grow(self, account: Account, amount: int, owner: Identity) -> None:
        """Takes more bytes for an accumulator of an identity.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """

    @abstractmethod
    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work on `num_bytes` of data that allocates memory, and that can begin again.

        Raises:
            MemoryError: There is not enough memory.
            ResourceExhaustedError: Likewise.
        """

    @abstractmethod
    def may_be_written(self, array: Array) -> bool:
        """Returns True if nothing forbids to write to an array."""

    @abstractmethod
    def protect(self, array: Array) -> None:
        """Forbids to write to an array from now on."""

    # Gradients. These run in any thread.

    @abstractmethod
    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the dense components of a gradient that must be copied before they are added.

        Args:
            gradient: The gradient.
            is_checked: Whether its values are looked at before.
        """

    @abstractmethod
    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with such copies.

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

    # What is needed on the host

    @abstractmethod
    def average_copies(self, host_memory: Quota, allocate: AllocateAverage) -> AverageCopies:
        """Returns what copies the averages of one accumulator to other memory and back.

        Args:
            host_memory: The accumulator's quota of bytes on the host.
            allocate: Allocates an average's arrays on the host.
        """

    @abstractmethod
    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Quota
    ) -> AccumulatorJournal:
        """Returns a journal that takes gradients and averages from here.

        Args:
            journal: A journal that takes them from the host's memory.
            durability: What it writes.
            host_memory: The accumulator's quota of bytes on the host.
        """


@dataclass(frozen=True)
class HostPlace(Place):
    """The memory of the host; see `Place`.

    Attributes:
        memory: The quota of bytes.
    """

    memory: Quota

    has_sparse = True
    takes_from_anywhere = False

    def part(self, owner: Identity, container: str | None) -> Quota:
        """Returns the quota of bytes for an accumulator."""
        return self.memory.part(owner, container)

    async def grow(self, account: Account, amount: int, owner: Identity) -> None:
        """Takes more bytes."""
        account.grow(amount)

    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work."""
        return await self.compute.run(num_bytes, function, *args, **kwargs)

    def may_be_written(self, array: Array) -> bool:
        """Returns True if nothing forbids to write to an array."""
        return bool(array.flags.writeable)

    def protect(self, array: Array) -> None:
        """Forbids to write to an array from now on."""
        array.flags.writeable = False

    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the components of a gradient that others may change, if it is checked."""
        return list(gradient.dense) if gradient.live and is_checked else []

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with copies of all dense values."""
        return self.copies.copy(gradient)

    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array of real numbers in another dtype."""
        return converted(array, dtype)

    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, for messages."""
        return array[index]

    def average_copies(self, host_memory: Quota, allocate: AllocateAverage) -> AverageCopies:
        """Returns what copies nothing."""
        return AverageCopies()

    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Quota
    ) -> AccumulatorJournal:
        """Returns the journal itself."""
        return journal


AUTO = "auto"
"""The name of the device of the ops, whatever it is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """The places in which a server can have accumulators.

    Attributes:
        host: The host.
        device: The device of the ops, None if that is the host.
        default: The name of the place of accumulators that ask for none.

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
        """Returns the place of a name, None if there is none."""
        if name == AUTO:
            return self.device or self.host
        return next((each for each in (self.host, self.device) if each is not None and each.name == name), None)

    def named(self, spec: AccumulatorSpec) -> AccumulatorSpec:
        """Returns a spec with the name of a place, if it asks for the device of the ops, whatever that is."""
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
        """Returns the place of an accumulator that was there before: the host if its own is not there any more.

        Sums have the same bits there. A server that refused to start would take all the others away, too.
        """
        place = self.find(spec.device or self.host.name)
        if place is None:
            _log.warning("%s was on %s, which this server does not have: it is on the host now", what, spec.device)
        return place or self.host


def _sparse_component(spec: AccumulatorSpec) -> ComponentSpec | None:
    return next((each for each in spec.components if each.is_sparse), None)
