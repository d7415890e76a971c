"""Decides when an aggregator passes gradients on: when enough are there, or the first has waited long enough."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gradserve_server.errors import ServiceError

LeafT = TypeVar("LeafT")

_MOST_IDLE = 16
"""Keys of which nothing waits, and whose counts are kept all the same."""


@dataclass(eq=False)
class _Batch(Generic[LeafT]):
    """Gradients that go together.

    Attributes:
        count: The gradients of this key that have come since the last time that enough were there.
        leaves: Those that wait.
        timer: What passes them on in time; None if none waits.
    """

    count: int = 0
    leaves: list[LeafT] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Batches(Generic[LeafT]):
    """Collects gradients that can be added up, by a key. Used on the event loop only.

    A gradient that comes after the others were passed on without it does not wait for as many again: with it, enough
    have come.
    """

    def __init__(self, num_gradients: int, grace: float, forward: Callable[[list[LeafT]], object]) -> None:
        """Takes the rule.

        Args:
            num_gradients: How many are passed on at once.
            grace: Seconds that the first of them waits for others at most.
            forward: Passes gradients on.
        """
        self._num_gradients = num_gradients
        self._grace = grace
        self._forward = forward
        self._batches: dict[Hashable, _Batch[LeafT]] = {}
        self._closed: ServiceError | None = None

    @property
    def num_waiting(self) -> int:
        """The calls whose gradients wait for others."""
        return sum([len(each.leaves) for each in self._batches.values()])

    def add(self, key: Hashable, leaf: LeafT, count: int) -> None:
        """Adds a gradient that stands for `count`.

        Raises:
            ServiceError: The error of `close`, once that was called.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        batch = self._batches.setdefault(key, _Batch())
        batch.count += count
        batch.leaves.append(leaf)
        if batch.count >= self._num_gradients:
            del self._batches[key]
            self._flush(batch)
        elif batch.timer is None:
            batch.timer = asyncio.get_running_loop().call_later(self._grace, self._flush_late, batch)

    def close(self, error: ServiceError | None = None) -> list[LeafT]:
        """Returns the gradients that wait, and forgets them.

        Args:
            error: Refuses those that come later; None if none can.
        """
        self._closed = error
        waiting = [leaf for each in self._batches.values() for leaf in each.leaves]
        for each in self._batches.values():
            if each.timer is not None:
                each.timer.cancel()
        self._batches.clear()
        return waiting

    def _flush(self, batch: _Batch[LeafT]) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        leaves, batch.leaves, batch.timer = batch.leaves, [], None
        self._forward(leaves)

    def _flush_late(self, batch: _Batch[LeafT]) -> None:
        self._flush(batch)
        idle = [key for key, each in self._batches.items() if not each.leaves]
        for key in idle[:-_MOST_IDLE]:
            del self._batches[key]
