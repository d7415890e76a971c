"""All budgets of a server, and the memory of the host and the device that one holder takes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

from gradserve_server.config import LimitsConfig
from gradserve_server.devices.device import Array
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.security.identity import ANONYMOUS, Identity, ShareRules


class Sizes(NamedTuple):
    """Numbers of bytes in host memory and in device memory."""

    host: int = 0
    device: int = 0


_NO_DEVICE = Reservation(Budget(0, "bytes of no device"))


class Room:
    """One holder's reservations of host memory and device memory. At the end of a block they are given back.

    Attributes:
        host: The reservation of host memory.
        device: The reservation of device memory; of a budget of nothing if ops run on the host.
        owner: The holder.
    """

    __slots__ = ("device", "host", "owner")

    def __init__(self, host: Reservation, device: Reservation | None = None, owner: Identity = ANONYMOUS) -> None:
        self.host = host
        self.device = _NO_DEVICE if device is None else device
        self.owner = owner

    def __enter__(self) -> Self:
        """Returns the room."""
        return self

    def __exit__(self, *_: object) -> None:
        """Gives everything back."""
        self.settle()

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
            if sizes.device:
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
            if sizes.device:
                self.device.take_over(sizes.device, giver.device)
        except BaseException:
            self.host.settle(self.host.used - sizes.host)
            giver.host.settle(given)
            raise

    def settle(self, sizes: Sizes = Sizes()) -> None:  # noqa: B008
        """Sets both reservations, without checking the limits."""
        self.host.settle(sizes.host)
        if sizes.device != self.device.used:
            self.device.settle(sizes.device)


class Memory:
    """The memory of the host and, if ops run on a GPU, of the device.

    Attributes:
        host: The budget of bytes of host memory.
        device: The budget of bytes of device memory; None if ops run on the host.
    """

    def __init__(
        self, host: Budget, device: Budget | None = None, holds: Callable[[Array], bool] = lambda _: False
    ) -> None:
        """Takes the budgets.

        Args:
            host: The budget of bytes of host memory.
            device: The budget of bytes of device memory; None if ops run on the host.
            holds: Returns whether an array is on the device.
        """
        self.host = host
        self.device = device
        self._holds = holds

    def room(self, purpose: Purpose, owner: Identity = ANONYMOUS, container: str | None = None) -> Room:
        """Returns an empty room of an identity in a container."""
        host = self.host.reserve(owner=owner, container=container, purpose=purpose)
        return Room(host, self._on_device(purpose, owner, container), owner)

    def room_of_call(self, owner: Identity = ANONYMOUS) -> Room:
        """Returns an empty room for the results of a call.

        Device memory counts against the caller from the start; host memory only when the results are stored.
        """
        purpose = Purpose.COMPUTING
        return Room(self.host.reserve(purpose=purpose), self._on_device(purpose, owner, None), owner)

    def _on_device(self, purpose: Purpose, owner: Identity, container: str | None) -> Reservation | None:
        if self.device is None:
            return None
        return self.device.reserve(owner=owner, container=container, purpose=purpose)

    def is_on_device(self, array: Array) -> bool:
        """Returns True if an array is in device memory."""
        return self.device is not None and self._holds(array)

    def sizes(self, arrays: Iterable[Array]) -> Sizes:
        """Returns the bytes of arrays in each memory."""
        if self.device is None:
            return Sizes(sum([array.nbytes for array in arrays]))
        host = device = 0
        for array in arrays:
            if self._holds(array):
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
            self.device_memory = Budget(
                min(limits.max_device_bytes or device_bytes, device_bytes),
                "bytes of the device's memory (--max-device-bytes)",
                rules,
                of_identity=lambda own: own.max_device_bytes,
                code="GS_DEVICE_MEMORY",
            )
        self.memory = Budget(
            limits.max_bytes,
            "bytes of tensor memory",
            rules,
            of_identity=lambda own: own.max_bytes,
            of_container=lambda own: own.max_bytes,
            code="GS_MEMORY",
        )
        self.bookkeeping = Budget(limits.bookkeeping_bytes, "bytes of bookkeeping", rules, code="GS_MEMORY")
        self.handles = Budget(
            limits.max_handles,
            "tensor handles",
            rules,
            cost=(self.bookkeeping, _HANDLE_BYTES),
            of_identity=lambda own: own.max_handles,
        )
        self.layers = Budget(
            limits.max_layers,
            "layers",
            rules,
            cost=(self.bookkeeping, _LAYER_BYTES),
            of_container=lambda own: own.max_layers,
        )
