"""What a layer object remembers of its forwards, between calls."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gradserve.wire.dtypes import DType

MAX_NAMED = 1 << 14
"""Forwards that one request names at most. The server takes four times as many; together with inline tensors so many
names fit into a message of gRPC's default size."""

MAX_REMEMBERED = 1 << 16
"""Forwards of each kind that a layer object remembers: a program that never says what is to become of them does not
fill its memory with names."""

ValueT = TypeVar("ValueT")


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
    """The forwards of one layer object, the newest of each kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: OrderedDict[str, UnusedForward] = OrderedDict()
        self._replaceable: OrderedDict[str, None] = OrderedDict()
        self._pending: OrderedDict[str, None] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()

    def useless(self, *, replacing: bool) -> list[str]:
        """Returns forwards that the server may let go of when the next one is computed: as many as one request names.

        They are remembered until `let_go` says that it did.

        Args:
            replacing: Whether the next one takes the place of those that are replaceable.
        """
        with self._lock:
            replaced = self._replaceable if replacing else ()
            return list(dict.fromkeys((*replaced, *self._lost)))[:MAX_NAMED]

    def let_go(self, forward_ids: Iterable[str]) -> None:
        """Forgets forwards whose gradients cannot be computed any more. Their updates can."""
        with self._lock:
            for forward_id in forward_ids:
                self._unused.pop(forward_id, None)
                self._replaceable.pop(forward_id, None)
                self._lost.pop(forward_id, None)

    def add_unused(self, forward: UnusedForward) -> None:
        """Remembers a forward whose gradients can be computed: the newest one."""
        with self._lock:
            _append(self._unused, forward.forward_id, forward)
            if forward.replaceable:
                _append(self._replaceable, forward.forward_id, None)

    def add_pending(self, forward_id: str) -> None:
        """Remembers a forward whose updates wait."""
        with self._lock:
            _append(self._pending, forward_id, None)

    def add_lost(self, forward_id: str) -> None:
        """Remembers a forward whose call failed: the server may have it, nobody has its name."""
        with self._lock:
            _append(self._lost, forward_id, None)

    def newest_unused(self) -> UnusedForward | None:
        """Returns the newest forward whose gradients can be computed."""
        with self._lock:
            return next(reversed(self._unused.values()), None)

    def pending(self) -> list[str]:
        """Returns the forwards whose updates wait, in their order."""
        with self._lock:
            return list(self._pending)

    def outstanding(self) -> list[str]:
        """Returns the forwards for whose gradients the server keeps something, and those lost."""
        with self._lock:
            return list(dict.fromkeys((*self._unused, *self._lost)))

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
            for kind in (self._unused, self._replaceable, self._pending, self._lost):
                kind.clear()


def in_requests(forward_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Divides forwards into as many as one request names, in their order."""
    for start in range(0, len(forward_ids), MAX_NAMED):
        yield forward_ids[start : start + MAX_NAMED]


def _append(kind: OrderedDict[str, ValueT], forward_id: str, value: ValueT) -> None:
    """Puts a forward last, unless it is there already, and drops the oldest when there are too many."""
    kind[forward_id] = value
    if len(kind) > MAX_REMEMBERED:
        kind.popitem(last=False)
