"""Batches that can be told apart in a moving mean, which tells in which order they came."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHANNELS = 96
"""The most forwards of a layer that can be told apart."""
DECAY = 0.5


def batch_of(number: int) -> NDArray[np.float32]:
    """Returns inputs whose mean is 1 in one channel, and whose variance is 0."""
    rows = np.zeros((2, CHANNELS), np.float32)
    rows[:, number] = 1
    return rows


def order_in(moving_mean: NDArray[Any]) -> tuple[int, ...]:
    """Returns the numbers of the forwards that a moving mean consists of, in their order.

    An update halves everything, and adds a half in its channel: one that was followed by n others has left 2^-(n+1).

    Raises:
        ValueError: No updates lead to this mean.
    """
    places: dict[int, int] = {}
    for number in np.flatnonzero(moving_mean).tolist():
        rest = float(moving_mean[number])
        while rest > 0:
            _, exponent = math.frexp(rest)
            if -exponent in places:
                raise ValueError(f"f{number} and f{places[-exponent]} were counted at the same time")
            places[-exponent] = number
            rest -= math.ldexp(1.0, exponent - 1)
    if sorted(places) != list(range(len(places))):
        raise ValueError(f"expected one after the other, got {places}")
    return tuple(places[later] for later in sorted(places, reverse=True))
