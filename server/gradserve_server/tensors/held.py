"""Stored tensors as calls hold them: the memory in which they are, and the orders and receipts to find them by."""

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from numpy.typing import NDArray

from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.devices.device import Array, Device
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.budget import Purpose, Reservation
from gradserve_server.resources.lifetimes import Lease
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.security.identity import owner_named


class Residence:
    """Brings stored tensors, which are where ops left them, to the host when they are needed there."""

    def __init__(self, host: Device, device: Device, compute: Compute, device_compute: Compute | None = None) -> None:
        """Takes the devices, and what copies.

        Args:
            host: The host as a device.
            device: The device of the ops, which is the same if they run on the CPU.
            compute: Runs what reads and writes the host's memory.
            device_compute: Runs what reads and writes the device's memory; None for the same.
        """
        self._host = host
        self._device = device
        self._compute = compute
        self._device_compute = device_compute or compute

    async def is_on_host(self, arrays: Sequence[Array]) -> bool:
        """Returns True if all the arrays are in host memory."""
        return await self._compute.run(PIECE_BYTES * len(arrays) // 4, lambda: all(map(self._host.holds, arrays)))

    async def copy_to_host(self, arrays: Sequence[Array]) -> list[NDArray[Any]]:
        """Returns arrays in host memory; copies only those that are elsewhere.

        Raises:
            MemoryError: There is not enough memory.
        """
        if await self.is_on_host(arrays):
            return list(arrays)
        return await self._device_compute.run_in_thread(lambda: [self._copy(array) for array in arrays])

    async def copy(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns copies of arrays, each in the memory where the array is.

        Raises:
            MemoryError: There is not enough memory.
        """
        work = max(sum([array.nbytes for array in arrays]), PIECE_BYTES * len(arrays) // 4)
        if await self.is_on_host(arrays):
            return await self._compute.run(work, lambda: [array.copy() for array in arrays])
        return await self._device_compute.run_in_thread(self._copy_each, arrays)

    async def copy_to_device(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns copies of arrays in the memory of the ops' device, which is not the host.

        Raises:
            MemoryError: There is not enough memory.
        """
        return await self._device_compute.run_in_thread(self._copy_each_to_device, arrays)

    async def fill(self, targets: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Fills arrays in the memory of the ops' device with others, wherever these are, of the same dtypes and shapes.

        Returns when they are filled.
        """
        await self._device_compute.run_in_thread(self._fill, targets, arrays)

    def _copy_each(self, arrays: Sequence[Array]) -> list[Array]:
        with self._device.computing():
            return [array.copy() for array in arrays]

    def _copy_each_to_device(self, arrays: Sequence[Array]) -> list[Array]:
        with self._device.computing():
            return [self._device.from_host(array) if self._host.holds(array) else array.copy() for array in arrays]

    def _fill(self, targets: Sequence[Array], arrays: Sequence[Array]) -> None:
        with self._device.computing():
            for target, array in zip(targets, arrays, strict=True):
                if self._host.holds(array):
                    self._device.write(target, 0, array)
                else:
                    target[...] = array

    def _copy(self, array: Array) -> NDArray[Any]:
        if self._host.holds(array):
            host: NDArray[Any] = array
            return host
        with self._device.computing():
            return self._device.to_host(array)


@dataclass(eq=False, slots=True)
class Entry:
    """A stored tensor. Only the store, and the code that moves tensors, change it."""

    handle: str
    serial: int
    array: Array
    lease: Lease[str]
    memory: Reservation
    place: Reservation
    """Its reservation in the budget of handles."""
    shared: bool
    """True if the memory is referenced from outside the store."""
    owner: str
    """The name of the identity that owns it."""
    freed: Callable[[], None] | None = None
    """Called when it is freed."""
    users: int = 0
    deleted: bool = False


class HeldTensors:
    """Stored tensors while a call uses them.

    Attributes:
        arrays: The arrays by handle, each in the memory of its device. Nobody writes to them, except the caller if
            `exclusive`.
    """

    def __init__(self, memory: Memory, *, release: bool = False) -> None:
        self._memory = memory
        self._entries: dict[str, Entry] = {}
        self._release = release
        self._shares = False
        self.arrays: dict[str, Array] = {}

    def add(self, entry: Entry) -> None:
        """Adds a tensor whose use has begun."""
        self._entries[entry.handle] = entry
        self.arrays[entry.handle] = entry.array

    @property
    def exclusive(self) -> bool:
        """True if no other call can ever see the arrays, so that the caller may take over their memory."""
        if not self._release or not self._entries:
            return False
        return all(entry.users == 1 and not entry.shared for entry in self._entries.values())

    @property
    def memory(self) -> tuple[Reservation, ...]:
        """The reservations of the tensors' memory, for callers that take it over."""
        return tuple(entry.memory for entry in self._entries.values())

    def share(self) -> None:
        """Notes that the call will use the memory after it ends, including that of copies it installs."""
        self._shares = True
        for entry in self._entries.values():
            entry.shared = True

    async def bring_to_host(self, residence: Residence) -> None:
        """Moves the tensors to host memory, for this call and later ones.

        Raises:
            ResourceExhaustedError: There is not enough memory.
            MemoryError: Likewise.
        """
        arrays = list(self.arrays.values())
        if await residence.is_on_host(arrays):
            return
        with self._memory.room_of_call() as room:
            room.grow(Sizes(self._memory.sizes(arrays).device))
            copies = await residence.copy_to_host(arrays)
            for handle, array, copy in zip(list(self.arrays), arrays, copies, strict=True):
                if copy is not array:
                    self.relocate(handle, copy, room)

    def relocate(self, handle: str, array: Array, giver: Room) -> None:
        """Replaces a tensor by a copy private to this call, unless another call has installed a copy first.

        Args:
            handle: The handle of the tensor.
            array: The copy, possibly in other memory.
            giver: The call's reservation for the copy.
        """
        entry = self._entries[handle]
        are_there = self._memory.is_on_device(array) and self._memory.is_on_device(entry.array)
        if are_there and entry.array is not self.arrays[handle]:
            return
        move(entry, array, self._memory, giver)
        entry.shared = self._shares
        self.arrays[handle] = array


def move(entry: Entry, array: Array, memory: Memory, giver: Room) -> None:
    """Replaces the array of a stored tensor, with its reservation.

    Args:
        entry: The tensor.
        array: The new array, whose memory the giver has reserved.
        memory: The memory that tensors count against.
        giver: The room that pays for the new array.
    """
    is_on_device = memory.is_on_device(array)
    if is_on_device != memory.is_on_device(entry.array):
        room = memory.room(Purpose.STORED, owner_named(entry.owner))
        given, taken = (giver.device, room.device) if is_on_device else (giver.host, room.host)
        given.settle(max(given.used - array.nbytes, 0))
        taken.settle(array.nbytes)
        entry.memory.settle(0)
        entry.memory = taken
    entry.array = array


class IdleTensors:
    """Unused tensors on the device, which can be evicted, in the order of their last use.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._of_owner: dict[str, dict[Entry, int]] = {}
        self._bytes_of: dict[str, int] = {}
        self._times = itertools.count()

    def add(self, entry: Entry) -> None:
        """Adds a tensor whose last use has just ended."""
        self._of_owner.setdefault(entry.owner, {})[entry] = next(self._times)
        self._bytes_of[entry.owner] = self.num_bytes(entry.owner) + entry.array.nbytes

    def discard(self, entry: Entry) -> None:
        """Removes a tensor that is about to be used or is gone, if it is in the list."""
        if self._of_owner.get(entry.owner, {}).pop(entry, None) is not None:
            self._bytes_of[entry.owner] -= entry.array.nbytes

    @property
    def owners(self) -> list[str]:
        """The names of the owners of such tensors."""
        return [owner for owner, entries in self._of_owner.items() if entries]

    def num_bytes(self, owner: str) -> int:
        """Returns the bytes of an owner's tensors."""
        return self._bytes_of.get(owner, 0)

    def oldest(self, owners: Iterable[str]) -> Iterator[Entry]:
        """Iterates over the tensors of some owners, least recently used first."""
        queues = [self._of_owner[owner].items() for owner in owners if owner in self._of_owner]
        return (entry for entry, _ in merge(*queues, key=lambda item: item[1]))


ItemT = TypeVar("ItemT")

_BUCKET_SIZE = 512


class Serials(Generic[ItemT]):
    """Items by serial number. The cost of a page depends on its own length, not on the number of items.

    Items are in buckets by number. Within a bucket, only the few that were removed and added again are out of order.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, ItemT]] = {}
        self._numbers: list[int] = []
        """The numbers of the buckets, sorted."""

    def add(self, serial: int, item: ItemT) -> None:
        """Adds an item, new or removed before."""
        number = serial // _BUCKET_SIZE
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            insort(self._numbers, number)
        bucket[serial] = item

    def remove(self, serial: int) -> None:
        """Removes an existing item."""
        number = serial // _BUCKET_SIZE
        bucket = self._buckets[number]
        del bucket[serial]
        if not bucket:
            del self._buckets[number]
            del self._numbers[bisect_left(self._numbers, number)]

    def after(self, serial: int, count: int) -> list[ItemT]:
        """Returns up to `count` items with greater numbers, sorted by number."""
        return list(islice(self._all_after(serial), count))

    def _all_after(self, serial: int) -> Iterator[ItemT]:
        first = bisect_left(self._numbers, serial // _BUCKET_SIZE)
        for number in islice(self._numbers, first, None):
            for key, item in sorted(self._buckets[number].items()):
                if key > serial:
                    yield item


MAX_RECEIPT_BYTES = 64
REMEMBERED_RECEIPTS = 10_000
"""The number of latest void receipts that a server remembers."""


class Receipt(NamedTuple):
    """A client's name for the tensors that one call stores.

    Attributes:
        owner: The name of the identity that makes the call.
        name: The name, which that identity chose at random.
    """

    owner: str
    name: bytes


class Receipts:
    """The stored tensors of each receipt, and the latest receipts that are void.

    A receipt becomes void when its client gives up the call. What the call stores after that is deleted at once.
    """

    def __init__(self, delete: Callable[[Sequence[str]], int]) -> None:
        self._delete = delete
        self._handles: dict[Receipt, dict[str, None]] = {}
        self._receipts: dict[str, Receipt] = {}
        self._void: OrderedDict[Receipt, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._receipts)

    def sign(self, receipt: Receipt, handle: str) -> None:
        """Notes that a tensor was stored; deletes it if nobody waits for its handle any more."""
        if receipt in self._void:
            self._delete([handle])
            return
        self._handles.setdefault(receipt, {})[handle] = None
        self._receipts[handle] = receipt

    def redeem(self, receipt: Receipt) -> int:
        """Deletes the tensors of a receipt, and makes it void; returns the number of tensors."""
        self._void[receipt] = None
        self._void.move_to_end(receipt)
        if len(self._void) > REMEMBERED_RECEIPTS:
            self._void.popitem(last=False)
        return self._delete(list(self._handles.get(receipt, ())))

    def forget(self, handle: str) -> None:
        """Notes that a tensor was deleted."""
        receipt = self._receipts.pop(handle, None)
        if receipt is not None:
            named = self._handles[receipt]
            del named[handle]
            if not named:
                del self._handles[receipt]


def check_receipt(name: bytes, field: str) -> bytes:
    """Returns a receipt of a request.

    Raises:
        InvalidArgumentError: It is too long.
    """
    if len(name) > MAX_RECEIPT_BYTES:
        raise InvalidArgumentError(
            f"expected a receipt of at most {MAX_RECEIPT_BYTES} bytes, got {len(name)}", field=field
        )
    return name
