"""The memory of the host and that of the device, and what one holder has of both."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from gradserve_server.devices.device import Array
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.fair_quota import FairQuota
from gradserve_server.tensors.purpose_quota import PurposeQuota
from gradserve_server.tensors.quotas import Account, Quota


class Sizes(NamedTuple):
    """Bytes of the memory of the host, and of the device."""

    host: int = 0
    device: int = 0


class Purpose(Enum):
    """What memory of the device is taken for."""

    COMPUTING = "computing"
    """Calls under way: their outputs, copies of inputs, and what they take besides."""
    STORED = "stored"
    """Stored tensors."""
    ACCUMULATORS = "accumulators"
    """Sums and averages of accumulators."""
    LAYERS = "layers"
    """Variables of layers, and what they keep of forwards."""


class DeviceMemory:
    """The memory of a device that has its own.

    Attributes:
        quota: Its quota of bytes.
        holds: Whether an array is there.
    """

    def __init__(self, quota: FairQuota, holds: Callable[[Array], bool]) -> None:
        """Takes the attributes."""
        self.quota = quota
        self.holds = holds
        self._purposes = {purpose: PurposeQuota(quota) for purpose in Purpose}

    @property
    def used(self) -> Mapping[Purpose, int]:
        """How much of it is taken for each purpose."""
        return {purpose: quota.used for purpose, quota in self._purposes.items()}

    def part(self, purpose: Purpose, owner: Identity = ANONYMOUS, container: str | None = None) -> Quota:
        """Returns the quota for what is taken for a purpose, and belongs to an identity; see `Quota.part`."""
        return self._purposes[purpose].part(owner, container)


class Room:
    """One holder's share of the memory of the host, and of the device.

    Attributes:
        host: Its share of the host's.
        device: Its share of the device's; of nothing where ops run on the host.
        owner: The holder.
    """

    __slots__ = ("device", "host", "owner")

    def __init__(self, host: Account, device: Account | None = None, owner: Identity = ANONYMOUS) -> None:
        """Takes the shares."""
        self.host = host
        self.device = Account(Quota(0, "bytes of no device")) if device is None else device
        self.owner = owner

    @property
    def used(self) -> int:
        """The bytes of both."""
        return self.host.used + self.device.used

    def another(self) -> "Room":
        """Returns another room of the same holder, which has nothing yet."""
        return Room(self.host.another(), self.device.another(), self.owner)

    def grow(self, sizes: Sizes) -> None:
        """Takes more of both; moves nothing to make room.

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
        """Takes more of both: first what another holder has reserved, then the rest; see `Account.take_over`.

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
        """Sets what it has of both, whether or not that is within the limits."""
        self.host.settle(sizes.host)
        self.device.settle(sizes.device)


class Memories:
    """The memory of the host, and that of the device if it has its own.

    Attributes:
        host: The quota of bytes of the host's.
        device: The device's; None if the ops run on the host.
    """

    def __init__(self, host: Quota, device: DeviceMemory | None = None, purpose: Purpose = Purpose.COMPUTING) -> None:
        """Takes the attributes, and what the device's is taken for."""
        self.host = host
        self.device = device
        self._purpose = purpose
        self._nothing = Quota(0, "bytes of no device")

    def room(self, owner: Identity = ANONYMOUS, container: str | None = None) -> Room:
        """Returns a room for what belongs to an identity, and is in a container; see `Quota.part`."""
        return Room(Account(self.host.part(owner, container)), self._on_device(owner, container), owner)

    def room_of_call(self, owner: Identity = ANONYMOUS) -> Room:
        """Returns a room for the results of a call. What is on the device counts for the caller from the start.

        What is on the host counts for an owner only when it is stored.
        """
        return Room(Account(self.host), self._on_device(owner, None), owner)

    def _on_device(self, owner: Identity, container: str | None) -> Account:
        return Account(self._nothing if self.device is None else self.device.part(self._purpose, owner, container))

    def is_on_device(self, array: Array) -> bool:
        """Returns True if an array counts for the device."""
        return self.device is not None and self.device.holds(array)

    def sizes(self, arrays: Iterable[Array]) -> Sizes:
        """Returns the bytes of arrays, where they are."""
        if self.device is None:
            return Sizes(sum([array.nbytes for array in arrays]))
        host = device = 0
        for array in arrays:
            if self.device.holds(array):
                device += array.nbytes
            else:
                host += array.nbytes
        return Sizes(host, device)
