"""What a layer object remembers of its forwards, between calls."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from gradserve.wire.dtypes import DType


@dataclass(frozen=True)
class UnusedForward:
    """A forward whose gradients can be computed and were not yet.

    Attributes:
        forward_id: Its name on the server.
        dtype: Of its outputs.
        replaceable: Only the layer object knows its name: the next call of this kind makes it useless.
    """

    forward_id: str
    dtype: DType
    replaceable: bool


class Forwards:
    """The forwards of one layer object. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: dict[str, UnusedForward] = {}
        self._pending: dict[str, None] = {}
        self._lost: set[str] = set()

    def useless(self, *, replacing: bool) -> list[str]:
        """Returns the forwards that the server may let go of when the next one is computed.

        They are remembered until `let_go` says that it did.

        Args:
            replacing: Whether the next one takes the place of those that are replaceable.
        """
        with self._lock:
            replaced = {each.forward_id for each in self._unused.values() if replacing and each.replaceable}
            return sorted(self._lost | replaced)

    def let_go(self, forward_ids: Iterable[str]) -> None:
        """Forgets forwards whose gradients cannot be computed any more. Their updates can."""
        with self._lock:
            for forward_id in forward_ids:
                self._unused.pop(forward_id, None)
                self._lost.discard(forward_id)

    def add_unused(self, forward: UnusedForward) -> None:
        """Remembers a forward whose gradients can be computed: the newest one."""
        with self._lock:
            self._unused[forward.forward_id] = forward

    def add_pending(self, forward_id: str) -> None:
        """Remembers a forward whose updates wait."""
        with self._lock:
            self._pending[forward_id] = None

    def add_lost(self, forward_id: str) -> None:
        """Remembers a forward whose call failed: the server may have it, nobody has its name."""
        with self._lock:
            self._lost.add(forward_id)

    def newest_unused(self) -> UnusedForward | None:
        """Returns the newest forward whose gradients can be computed."""
        with self._lock:
            return next(reversed(self._unused.values()), None)

    def pending(self) -> list[str]:
        """Returns the forwards whose updates wait, in their order."""
        with self._lock:
            return list(self._pending)

    def unused_without_updates(self) -> list[str]:
        """Returns the forwards of which nothing is left but to compute their gradients, and those lost."""
        with self._lock:
            return sorted((self._lost | self._unused.keys()) - self._pending.keys())

    def updated(self, forward_ids: Iterable[str]) -> None:
        """Forgets that updates wait."""
        with self._lock:
            for forward_id in forward_ids:
                self._pending.pop(forward_id, None)

    def forget(self, forward_ids: Iterable[str]) -> None:
        """Forgets forwards altogether."""
        forgotten = list(forward_ids)
        self.let_go(forgotten)
        self.updated(forgotten)

    def forget_all(self) -> None:
        """Forgets all forwards."""
        with self._lock:
            self._unused.clear()
            self._pending.clear()
            self._lost.clear()
