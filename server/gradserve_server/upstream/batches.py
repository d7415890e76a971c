"""Batches of gradients that an aggregator forwards as one sum, and its counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gradserve_server.accumulators.gradient import Array, Contribution, Gradient
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import ServiceError

_MOST_IDLE = 16
"""Keys without waiting gradients whose counts are still kept."""
LeafT = TypeVar("LeafT")


@dataclass(frozen=True)
class ForwardingRule:
    """The rule for forwarding a batch of gradients.

    Attributes:
        num_gradients: The number of gradients in a full batch.
        grace: The most seconds that the first of them waits for others.
    """

    num_gradients: int
    grace: float


@dataclass(eq=False)
class _Batch(Generic[LeafT]):
    """The waiting gradients of one key.

    Attributes:
        count: The gradients of this key since its last full batch.
        leaves: The gradients that wait.
        timer: Forwards them when the grace is over; None if none waits.
    """

    count: int = 0
    leaves: list[LeafT] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Batches(Generic[LeafT]):
    """Collects gradients that can be added up, by a key. Used on the event loop only.

    A gradient that arrives after the others were forwarded without it does not wait for a whole batch again: it
    completes the earlier one.
    """

    def __init__(self, rule: ForwardingRule, forward: Callable[[list[LeafT]], object]) -> None:
        self._rule = rule
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
        if batch.count >= self._rule.num_gradients:
            del self._batches[key]
            self._flush(batch)
        elif batch.timer is None:
            batch.timer = asyncio.get_running_loop().call_later(self._rule.grace, self._flush_late, batch)

    def close(self, error: ServiceError | None = None) -> list[LeafT]:
        """Removes and returns the waiting gradients.

        Args:
            error: The error for later gradients; None if none can come.
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


@dataclass
class Counts:
    """Numbers since the start of the server, for metrics.

    Attributes:
        gradients: Gradients received for accumulators upstream, and updates of parameters.
        sums: Forwarded sums of several.
        alone: Those that were forwarded alone.
        downloads: Averages and versions read upstream for readers here.
        reads: Averages and versions returned to readers here.
    """

    gradients: int = 0
    sums: int = 0
    alone: int = 0
    downloads: int = 0
    reads: int = 0


def in_order(contributions: Sequence[Contribution]) -> list[int]:
    """Returns the order in which gradients are added: that of (worker_id, sequence), so that the bits repeat."""
    return sorted(range(len(contributions)), key=lambda at: (contributions[at].worker_id, contributions[at].sequence))


def sum_bytes(spec: AccumulatorSpec, gradient: Gradient) -> int:
    """Returns the memory of a sum of gradients like this one."""
    return sum([value.size * spec.dense_sum_dtypes[name].itemsize for name, value in gradient.dense.items()])


def summed(
    spec: AccumulatorSpec, place: Place, gradients: Sequence[tuple[Contribution, Gradient]]
) -> Mapping[str, Array]:
    """Returns the sum of checked dense gradients, each times its factor, in the dtypes of the accumulator's sums.

    Each addition is rounded as in the accumulator itself.

    Args:
        spec: The accumulator's spec.
        place: Computes.
        gradients: The gradients, in the order in which they are added, with what they contribute; at least one. All
            have the same components.

    Raises:
        MemoryError: There is not enough memory.
    """
    names = list(gradients[0][1].values)
    lists: list[list[Any]] = [[gradient.values[name] for name in names] for _, gradient in gradients]
    factors = [contribution.factor for contribution, _ in gradients]
    dtypes = spec.dense_sum_dtypes
    totals = [place.allocate(value.shape, dtypes[name]) for name, value in zip(names, lists[0], strict=True)]
    place.reducer.scale(lists[0], factors[0], totals)
    for values, factor in zip(lists[1:], factors[1:], strict=True):
        place.reducer.add_scaled(totals, values, factor)
    return dict(zip(names, totals, strict=True))
