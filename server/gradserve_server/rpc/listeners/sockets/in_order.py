"""How much of a payload has arrived, from its beginning on, while its parts arrive at the same time."""

import threading
from collections.abc import Callable, Sequence
from functools import partial


class InOrder:
    """Counts the bytes of parts, and tells how many more bytes have arrived without a gap.

    Safe to use from several threads.
    """

    def __init__(self, sizes: Sequence[int], on_bytes: Callable[[int], None]) -> None:
        """Takes the sizes of the parts, and what is told, by one thread at a time."""
        self._left = list(sizes)
        self._ahead = [0] * len(sizes)
        self._on_bytes = on_bytes
        self._first = 0
        self._lock = threading.Lock()

    def of(self, part: int) -> Callable[[int], None]:
        """Returns what is told how many more bytes of a part have arrived."""
        return partial(self._advance, part)

    def _advance(self, part: int, num_bytes: int) -> None:
        with self._lock:
            self._ahead[part] += num_bytes
            in_order = 0
            while self._first < len(self._left):
                arrived = self._ahead[self._first]
                self._ahead[self._first] = 0
                self._left[self._first] -= arrived
                in_order += arrived
                if self._left[self._first]:
                    break
                self._first += 1
            if in_order:
                self._on_bytes(in_order)
