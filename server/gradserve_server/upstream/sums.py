"""Adds up gradients that an aggregator passes on as one."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradserve_server.accumulators.gradient import Array, Contribution, Gradient
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec


def in_order(contributions: Sequence[Contribution]) -> list[int]:
    """Returns the order in which gradients are added: that of (worker_id, sequence), so that the bits repeat."""
    return sorted(range(len(contributions)), key=lambda at: (contributions[at].worker_id, contributions[at].sequence))


def sum_bytes(spec: AccumulatorSpec, gradient: Gradient) -> int:
    """Returns the memory of a sum of gradients like this one."""
    dense = gradient.dense
    return sum([dense[name].size * dtype.itemsize for name, dtype in spec.dense_sum_dtypes.items()])


def summed(
    spec: AccumulatorSpec, place: Place, gradients: Sequence[tuple[Contribution, Gradient]]
) -> Mapping[str, Array]:
    """Returns the sum of checked dense gradients, each times its factor, in the dtypes of the accumulator's sums.

    Each addition is rounded as in the accumulator itself.

    Args:
        spec: The accumulator's spec.
        place: Computes.
        gradients: The gradients, in the order in which they are added, with what they contribute; at least one.

    Raises:
        MemoryError: There is not enough memory.
    """
    names = list(spec.dense_sum_dtypes)
    lists: list[list[Any]] = [[gradient.values[name] for name in names] for _, gradient in gradients]
    factors = [contribution.factor for contribution, _ in gradients]
    dtypes = spec.dense_sum_dtypes.values()
    totals = [place.allocate(value.shape, dtype) for value, dtype in zip(lists[0], dtypes, strict=True)]
    place.reducer.scale(lists[0], factors[0], totals)
    for values, factor in zip(lists[1:], factors[1:], strict=True):
        place.reducer.add_scaled(totals, values, factor)
    return dict(zip(names, totals, strict=True))
