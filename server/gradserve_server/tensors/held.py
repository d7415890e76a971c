"""Stored tensors as calls hold them, and the orders in which others find them: by last use, by serial number."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Generic, TypeVar

from gradserve_server.devices.device import Array
from gradserve_server.resources.budget import Purpose, Reservation
from gradserve_server.resources.leases import Lease
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.security.identity import owner_named
from gradserve_server.tensors.residence import Residence


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
