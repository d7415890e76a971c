"""Holds back calls while many are on their way to one accumulator, so that none is overtaken by more than it remembers.

A server remembers the latest `id_window` calls of each client on an accumulator, 1,024 unless told otherwise, and
refuses a call that arrives when later ones have filled that memory: it cannot tell whether it was carried out. Calls of
one client overtake each other, as they take several connections.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradserve.calls.exchange import Operation, Pause

MOST_CALLS = 512
"""The most calls sent since the earliest that may still be on its way, and that one itself: half the usual window."""
MOST_ON_ONE_CONNECTION = 200
"""The same for calls that do not wait: over gRPC all of them take one connection, and a server refuses more than 256
there, its max_connection_calls."""
ARRIVED_SECONDS = 3.0
"""The time after which a call without an answer counts as arrived: a push_pull waits for gradients of later calls."""
_PAUSE_SECONDS = 0.01
_SHARE_SECONDS = 0.0005
"""The part of a pause for each call that is held back: all together look about 2,000 times a second."""


@dataclass
class _Calls:
    """The calls on one accumulator.

    Attributes:
        num_sent: The number of calls sent.
        on_the_way: When each call was sent that may not have arrived, by its number, the earliest first.
        num_held: The number of calls that are held back.
    """

    num_sent: int = 0
    on_the_way: dict[int, float] = field(default_factory=dict)
    num_held: int = 0


class Pacing:
    """The calls of one client that count once, by accumulator. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, ...], _Calls] = {}

    def turn(self, accumulator: tuple[str, ...], *, waits: bool) -> Operation[None]:
        """Waits until another call may be sent, which `sent` must follow at once.

        Args:
            accumulator: The accumulator.
            waits: Whether the call waits for others.
        """
        calls = self._calls.get(accumulator)
        most = MOST_CALLS if waits else MOST_ON_ONE_CONNECTION
        if calls is None or self._may_send(calls, most):
            return
        calls.num_held += 1
        try:
            while not self._may_send(calls, most):
                yield Pause(_PAUSE_SECONDS + _SHARE_SECONDS * calls.num_held)
        finally:
            calls.num_held -= 1

    @contextmanager
    def sent(self, accumulator: tuple[str, ...]) -> Iterator[None]:
        """Notes a call, which is made in the block."""
        with self._lock:
            calls = self._calls.setdefault(accumulator, _Calls())
            number = calls.num_sent
            calls.num_sent += 1
            calls.on_the_way[number] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                calls.on_the_way.pop(number, None)
                if not calls.on_the_way and not calls.num_held:
                    self._calls.pop(accumulator, None)

    def _may_send(self, calls: _Calls, most: int) -> bool:
        with self._lock:
            latest = self._clock() - ARRIVED_SECONDS
            while calls.on_the_way:
                number, sent_at = next(iter(calls.on_the_way.items()))
                if sent_at > latest:
                    return calls.num_sent - number < most
                del calls.on_the_way[number]
            return True
