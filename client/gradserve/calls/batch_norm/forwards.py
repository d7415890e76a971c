"""The forwards that a layer object remembers between calls."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gradserve.wire.arrays import DType

MAX_NAMED = 1 << 14
"""The most forwards that one request names. The server takes four times as many; this many names and inline tensors fit
into a message of gRPC's default size."""

MAX_REMEMBERED = 1 << 16
"""The most forwards of each kind that a layer object remembers, so that a program that never uses or releases them does
not fill its memory with names."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class UnusedForward:
    """A forward whose gradients can be computed but have not been.

    Attributes:
        forward_id: Its name on the server.
        dtype: The dtype of its outputs.
        replaceable: Whether the next forward of this kind takes its place, since only the layer object knows its name.
    """

    forward_id: str
    dtype: DType
    replaceable: bool


class Forwards:
    """The forwards of one layer object, the newest of each kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: OrderedDict[str, UnusedForward] = OrderedDict()
        self._replaceable: OrderedDict[str, None] = OrderedDict()
        self._pending: OrderedDict[str, None] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()

    def useless(self, *, replacing: bool) -> list[str]:
        """Returns forwards that the server may release with the next one, at most as many as one request names.

        They are remembered until `let_go` confirms the release.

        Args:
            replacing: Whether the next forward takes the place of replaceable ones.
        """
        with self._lock:
            replaced = self._replaceable if replacing else ()
            return list(dict.fromkeys((*replaced, *self._lost)))[:MAX_NAMED]

    def let_go(self, forward_ids: Iterable[str]) -> None:
        """Forgets forwards whose gradients can no longer be computed, but not those forwards' updates."""
        with self._lock:
            for forward_id in forward_ids:
                self._unused.pop(forward_id, None)
                self._replaceable.pop(forward_id, None)
                self._lost.pop(forward_id, None)

    def add_unused(self, forward: UnusedForward) -> None:
        """Remembers a forward whose gradients can be computed, as the newest one."""
        with self._lock:
            _append(self._unused, forward.forward_id, forward)
            if forward.replaceable:
                _append(self._replaceable, forward.forward_id, None)

    def add_pending(self, forward_id: str) -> None:
        """Remembers a forward with pending updates."""
        with self._lock:
            _append(self._pending, forward_id, None)

    def add_lost(self, forward_id: str) -> None:
        """Remembers a forward whose call failed: the server may have it, but the caller never learned its name."""
        with self._lock:
            _append(self._lost, forward_id, None)

    def newest_unused(self) -> UnusedForward | None:
        """Returns the newest forward whose gradients can be computed."""
        with self._lock:
            return next(reversed(self._unused.values()), None)

    def pending(self) -> list[str]:
        """Returns the forwards with pending updates, oldest first."""
        with self._lock:
            return list(self._pending)

    def outstanding(self) -> list[str]:
        """Returns the forwards for whose gradients the server keeps data, and the lost ones."""
        with self._lock:
            return list(dict.fromkeys((*self._unused, *self._lost)))

    def updated(self, forward_ids: Iterable[str]) -> None:
        """Forgets the pending updates of forwards."""
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
            for kind in (self._unused, self._replaceable, self._pending, self._lost):
                kind.clear()


def in_requests(forward_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Splits forwards into batches of as many as one request names, in their order."""
    for start in range(0, len(forward_ids), MAX_NAMED):
        yield forward_ids[start : start + MAX_NAMED]


def _append(kind: OrderedDict[str, ValueT], forward_id: str, value: ValueT) -> None:
    """Puts a forward last, unless it is there already, and drops the oldest if there are too many."""
    kind[forward_id] = value
    if len(kind) > MAX_REMEMBERED:
        kind.popitem(last=False)
