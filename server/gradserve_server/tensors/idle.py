"""Stored tensors in the memory of a device that nobody uses."""

import itertools
from collections.abc import Iterable, Iterator
from heapq import merge

from gradserve_server.tensors.held import Entry


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
