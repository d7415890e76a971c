"""All budgets of a server, and the memory of the host and the device that one holder takes."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from gradserve_server.config import LimitsConfig
from gradserve_server.devices.device import Array
from gradserve_server.resources.budget import Budget, Cost, FairBudget, PurposeBudget, Reservation
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.security.shares import ShareRules


class Sizes(NamedTuple):
    """Numbers of bytes in host memory and in device memory."""

    host: int = 0
    device: int = 0


class Purpose(Enum):
    """The purposes for which device memory is reserved."""

    COMPUTING = "computing"
    """Calls in flight: outputs, copies of inputs, and scratch memory."""
    STORED = "stored"
    """Stored tensors."""
    ACCUMULATORS = "accumulators"
    """Sums and averages of accumulators."""
    LAYERS = "layers"
    """Variables of layers, and what they keep of forwards."""


class DeviceMemory:
    """The memory of a device, apart from the host's.

    Attributes:
        budget: The budget of its bytes.
        holds: Returns whether an array is on the device.
    """

    def __init__(self, budget: FairBudget, holds: Callable[[Array], bool]) -> None:
        self.budget = budget
        self.holds = holds
        self._purposes = {purpose: PurposeBudget(budget) for purpose in Purpose}

    @property
    def used(self) -> Mapping[Purpose, int]:
        """The bytes in use by purpose."""
        return {purpose: budget.used for purpose, budget in self._purposes.items()}

    def part(self, purpose: Purpose, owner: Identity = ANONYMOUS, container: str | None = None) -> Budget:
        """Returns the budget that an identity uses for a purpose; see `Budget.part`."""
        return self._purposes[purpose].part(owner, container)


class Room:
    """One holder's share of host memory and device memory.

    Attributes:
        host: The reservation of host memory.
        device: The reservation of device memory; of an empty budget if ops run on the host.
        owner: The holder.
    """

    __slots__ = ("device", "host", "owner")

    def __init__(self, host: Reservation, device: Reservation | None = None, owner: Identity = ANONYMOUS) -> None:
        self.host = host
        self.device = Reservation(Budget(0, "bytes of no device")) if device is None else device
        self.owner = owner

    @property
    def used(self) -> int:
        """The bytes of both."""
        return self.host.used + self.device.used

    def another(self) -> "Room":
        """Returns an empty room of the same holder."""
        return Room(self.host.another(), self.device.another(), self.owner)

    def grow(self, sizes: Sizes) -> None:
        """Takes more of both; does not evict anything.

        Raises:
            ResourceExhaustedError: There is not enough; nothing was taken.
        """
        self.host.grow(sizes.host)
        try:
            self.device.grow(sizes.device)
        except BaseException:
            self.host.settle(self.host.used - sizes.host)
            raise

    def take_over(self, sizes: Sizes, giver: "Room") -> None:
        """Takes more of both: first what another holder has reserved, then the rest; see `Reservation.take_over`.

        Raises:
            ResourceExhaustedError: There is not enough; nothing has changed.
        """
        given = giver.host.used
        self.host.take_over(sizes.host, giver.host)
        try:
            self.device.take_over(sizes.device, giver.device)
        except BaseException:
            self.host.settle(self.host.used - sizes.host)
            giver.host.settle(given)
            raise

    def settle(self, sizes: Sizes = Sizes()) -> None:  # noqa: B008
        """Sets both reservations, without checking the limits."""
        self.host.settle(sizes.host)
        self.device.settle(sizes.device)


class Memories:
    """The memory of the host and, if ops run on a GPU, of the device.

    Attributes:
        host: The budget of bytes of host memory.
        device: The device's memory; None if ops run on the host.
    """

    def __init__(self, host: Budget, device: DeviceMemory | None = None, purpose: Purpose = Purpose.COMPUTING) -> None:
        self.host = host
        self.device = device
        self._purpose = purpose
        self._nothing = Budget(0, "bytes of no device")

    def room(self, owner: Identity = ANONYMOUS, container: str | None = None) -> Room:
        """Returns an empty room of an identity in a container; see `Budget.part`."""
        return Room(Reservation(self.host.part(owner, container)), self._on_device(owner, container), owner)

    def room_of_call(self, owner: Identity = ANONYMOUS) -> Room:
        """Returns an empty room for the results of a call.

        Device memory counts against the caller from the start; host memory only when the results are stored.
        """
        return Room(Reservation(self.host), self._on_device(owner, None), owner)

    def _on_device(self, owner: Identity, container: str | None) -> Reservation:
        return Reservation(self._nothing if self.device is None else self.device.part(self._purpose, owner, container))

    def is_on_device(self, array: Array) -> bool:
        """Returns True if an array is in device memory."""
        return self.device is not None and self.device.holds(array)

    def sizes(self, arrays: Iterable[Array]) -> Sizes:
        """Returns the bytes of arrays in each memory."""
        if self.device is None:
            return Sizes(sum([array.nbytes for array in arrays]))
        host = device = 0
        for array in arrays:
            if self.device.holds(array):
                device += array.nbytes
            else:
                host += array.nbytes
        return Sizes(host, device)


_HANDLE_BYTES = 1024
"""The memory of a stored tensor or a kept forward without elements, measured."""
_LAYER_BYTES = 24 << 10
"""The memory of a layer without variables and tags."""


class Budgets:
    """The budgets of a server.

    Attributes:
        rules: How much an identity or a container may take of them.
        memory: The bytes of all tensors in host memory.
        stored_memory: The part of `memory` that stored tensors use.
        accumulator_memory: The part that accumulators use.
        layer_memory: The part that layers use.
        call_memory: The part that calls in flight use.
        device_memory: The bytes of device memory; None if ops run on the host.
        bookkeeping: The bytes of names, ids, specs and other data beside tensors.
        handles: The number of stored tensors, and of forwards that layers keep.
        layers: The number of layers.
    """

    def __init__(self, limits: LimitsConfig, rules: ShareRules, device_bytes: int | None = None) -> None:
        """Makes the budgets.

        Args:
            limits: The limits.
            rules: How much an identity or a container may take.
            device_bytes: The device memory that may be used; None if ops run on the host.
        """
        self.rules = rules
        self.device_memory = None
        if device_bytes is not None:
            self.device_memory = FairBudget(
                min(limits.max_device_bytes or device_bytes, device_bytes),
                "bytes of the device's memory (--max-device-bytes)",
                rules,
                of_identity=lambda own: own.max_device_bytes,
            )
        self.memory = FairBudget(
            limits.max_bytes,
            "bytes of tensor memory",
            rules,
            of_identity=lambda own: own.max_bytes,
            of_container=lambda own: own.max_bytes,
        )
        self.stored_memory = PurposeBudget(self.memory)
        self.accumulator_memory = PurposeBudget(self.memory)
        self.layer_memory = PurposeBudget(self.memory)
        self.call_memory = PurposeBudget(self.memory)
        self.bookkeeping = FairBudget(limits.bookkeeping_bytes, "bytes of bookkeeping", rules)
        self.handles = FairBudget(
            limits.max_handles,
            "tensor handles",
            rules,
            each=Cost(self.bookkeeping, _HANDLE_BYTES),
            of_identity=lambda own: own.max_handles,
        )
        self.layers = FairBudget(
            limits.max_layers,
            "layers",
            rules,
            each=Cost(self.bookkeeping, _LAYER_BYTES),
            of_container=lambda own: own.max_layers,
        )
