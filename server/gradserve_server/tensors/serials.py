"""Items in the order of their serial numbers."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

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
