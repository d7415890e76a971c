"""Why things that are gone are gone."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_KEY_LENGTH = 1024


class Tombstones(Generic[KeyT]):
    """Remembers why things were deleted by no call that named them, of the latest of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[KeyT, str] = OrderedDict()

    def put(self, key: KeyT, reason: str) -> None:
        """Remembers a reason, at the cost of the oldest; not where the key is too long for that."""
        if len(str(key)) > _MAX_KEY_LENGTH:
            return
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def remove(self, key: KeyT) -> None:
        """Forgets a reason: there is something else at the key."""
        self._reasons.pop(key, None)

    def reason(self, key: KeyT) -> str | None:
        """Returns why something is gone, None where that is not known."""
        return self._reasons.get(key)
