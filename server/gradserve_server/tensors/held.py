"""Stored tensors as calls hold them, and the orders in which others find them: by last use, by serial number."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Generic, TypeVar

from gradserve_server.devices.device import Array
from gradserve_server.resources.leases import Lease
from gradserve_server.resources.memory import Memories, Room, Sizes
from gradserve_server.resources.quotas import Account
from gradserve_server.security.identity import owner_named


@dataclass(eq=False, slots=True)
class Entry:
    """A stored tensor. Only the store and what moves tensors change it."""

    handle: str
    serial: int
    array: Array
    lease: Lease[str]
    memory: Account
    place: Account
    """Its share of the handles."""
    shared: bool
    """Whether something other than the store refers to the memory, too."""
    owner: str
    """The name of the identity whose tensor it is."""
    users: int = 0
    deleted: bool = False


class HeldTensors:
    """Stored tensors while a call uses them.

    Attributes:
        arrays: The arrays by handle, each in the memory of its device. Nobody writes to them, except the caller if
            `exclusive`.
    """

    def __init__(self, memories: Memories, *, release: bool = False) -> None:
        """Takes what the tensors count in, and whether they are deleted after the call."""
        self._memories = memories
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
        """True if nobody else can see the arrays, now or later, so that the caller may take over their memory."""
        if not self._release or not self._entries:
            return False
        return all(entry.users == 1 and not entry.shared for entry in self._entries.values())

    @property
    def memory(self) -> tuple[Account, ...]:
        """The accounts of the memory, from which those who take it over take it."""
        return tuple(entry.memory for entry in self._entries.values())

    def share(self) -> None:
        """Notes that the call will use the memory after its end, including that of the copies it puts in place."""
        self._shares = True
        for entry in self._entries.values():
            entry.shared = True

    @contextmanager
    def room_on_host(self) -> Iterator[Room]:
        """Reserves room on the host, during a block, for copies of the tensors that are on the device.

        Raises:
            ResourceExhaustedError: There is not enough.
        """
        room = self._memories.room_of_call()
        room.grow(Sizes(self._memories.sizes(self.arrays.values()).device))
        try:
            yield room
        finally:
            room.settle()

    def relocate(self, handle: str, array: Array, giver: Room) -> None:
        """Replaces a tensor by a copy that only this call knows of, unless another call has put one there already.

        Args:
            handle: The handle of the tensor.
            array: The copy, maybe in other memory.
            giver: What the call has reserved for the copy.
        """
        entry = self._entries[handle]
        are_there = self._memories.is_on_device(array) and self._memories.is_on_device(entry.array)
        if are_there and entry.array is not self.arrays[handle]:
            return
        move(entry, array, self._memories, giver)
        entry.shared = self._shares
        self.arrays[handle] = array


def move(entry: Entry, array: Array, memories: Memories, giver: Room) -> None:
    """Replaces the array of a stored tensor, with its account.

    Args:
        entry: The tensor.
        array: The new array, whose memory the giver has reserved.
        memories: What tensors count in.
        giver: The giver, who has that much less of it afterwards.
    """
    is_on_device = memories.is_on_device(array)
    if is_on_device != memories.is_on_device(entry.array):
        room = memories.room(owner_named(entry.owner))
        given, taken = (giver.device, room.device) if is_on_device else (giver.host, room.host)
        given.settle(max(given.used - array.nbytes, 0))
        taken.settle(array.nbytes)
        entry.memory.settle(0)
        entry.memory = taken
    entry.array = array


class IdleTensors:
    """Stored tensors that could make room on the device, in the order of their last use.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._of_owner: dict[str, dict[Entry, int]] = {}
        self._bytes_of: dict[str, int] = {}
        self._times = itertools.count()

    def add(self, entry: Entry) -> None:
        """Adds a tensor that was in use until now."""
        self._of_owner.setdefault(entry.owner, {})[entry] = next(self._times)
        self._bytes_of[entry.owner] = self.num_bytes(entry.owner) + entry.array.nbytes

    def discard(self, entry: Entry) -> None:
        """Removes a tensor that is used from now on, or is not there any more; others are ignored."""
        if self._of_owner.get(entry.owner, {}).pop(entry, None) is not None:
            self._bytes_of[entry.owner] -= entry.array.nbytes

    @property
    def owners(self) -> list[str]:
        """The names of those who have some."""
        return [owner for owner, entries in self._of_owner.items() if entries]

    def num_bytes(self, owner: str) -> int:
        """Returns how much the tensors of an owner hold."""
        return self._bytes_of.get(owner, 0)

    def oldest(self, owners: Iterable[str]) -> Iterator[Entry]:
        """Iterates over the tensors of some owners, the one first that was unused for the longest."""
        queues = [self._of_owner[owner].items() for owner in owners if owner in self._of_owner]
        return (entry for entry, _ in merge(*queues, key=lambda item: item[1]))


ItemT = TypeVar("ItemT")

_BUCKET_SIZE = 512


class Serials(Generic[ItemT]):
    """Items by serial number. A page of them costs as much as it has items, however many there are.

    The items are in buckets by number. Only a few items that were removed and came back are not in the order of their
    bucket.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, ItemT]] = {}
        self._numbers: list[int] = []
        """The numbers of the buckets, sorted."""

    def add(self, serial: int, item: ItemT) -> None:
        """Adds an item, or one that was removed."""
        number = serial // _BUCKET_SIZE
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            insort(self._numbers, number)
        bucket[serial] = item

    def remove(self, serial: int) -> None:
        """Removes an item that is there."""
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
