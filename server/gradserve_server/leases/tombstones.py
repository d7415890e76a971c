"""The reasons why resources no longer exist."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_KEY_LENGTH = 1024
_MAX_LENGTH = 1 << 20
"""The most characters of all keys."""


class Tombstones(Generic[KeyT]):
    """Remembers why resources were deleted without a call that named them; the latest ones only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[KeyT, str] = OrderedDict()
        self._length = 0

    def put(self, key: KeyT, reason: str) -> None:
        """Remembers a reason in the place of the oldest, unless the key is too long for that."""
        if _length(key) > _MAX_KEY_LENGTH:
            return
        self.remove(key)
        self._reasons[key] = reason
        self._length += _length(key)
        while len(self._reasons) > self._capacity or self._length > _MAX_LENGTH:
            self._length -= _length(self._reasons.popitem(last=False)[0])

    def remove(self, key: KeyT) -> None:
        """Forgets a reason, because there is a new resource with this key."""
        if self._reasons.pop(key, None) is not None:
            self._length -= _length(key)

    def reason(self, key: KeyT) -> str | None:
        """Returns why a resource no longer exists, None if that is not known."""
        return self._reasons.get(key)


def _length(key: Hashable) -> int:
    return len(str(key))
