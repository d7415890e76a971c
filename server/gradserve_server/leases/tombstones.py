"""The reasons why resources no longer exist."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_KEY_LENGTH = 1024


class Tombstones(Generic[KeyT]):
    """Remembers why resources were deleted without a call that named them; the latest ones only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[KeyT, str] = OrderedDict()

    def put(self, key: KeyT, reason: str) -> None:
        """Remembers a reason in the place of the oldest, unless the key is too long for that."""
        if len(str(key)) > _MAX_KEY_LENGTH:
            return
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def remove(self, key: KeyT) -> None:
        """Forgets a reason, because there is a new resource with this key."""
        self._reasons.pop(key, None)

    def reason(self, key: KeyT) -> str | None:
        """Returns why a resource no longer exists, None if that is not known."""
        return self._reasons.get(key)
