"""A worker that applies gradients as fast as it can, and counts those that were acknowledged."""

import contextlib
from collections.abc import MutableSequence, Sequence

import numpy as np
from numpy.typing import NDArray

import gradserve
from tests.servers.polling import PATIENCE_SECONDS

LEVELS = ("none", "round", "gradient")
NUM_WORKERS = 4
NEVER_STALE = 1 << 40


def accumulator(client: gradserve.Client, level: str) -> gradserve.GradientAccumulator:
    """Returns the accumulator of a durability."""
    components = {"x": np.zeros((NUM_WORKERS, 3))}
    return client.gradient_accumulator(components, shared_name=level, reduction_type="SUM", durability=level)


def total_of(rank: int, count: int) -> NDArray[np.float64]:
    """Returns the sum of a worker's first gradients: how many, the sum of their numbers, and that of the squares."""
    numbers = np.arange(count, dtype=np.float64)
    total = np.zeros((NUM_WORKERS, 3))
    total[rank] = count, numbers.sum(), (numbers**2).sum()
    return total


def work(address: str, rank: int, acknowledged: MutableSequence[int], is_over: Sequence[int]) -> None:
    """Applies gradients of each level.

    Args:
        address: The server.
        rank: The row of its gradients.
        acknowledged: Memory for the number of gradients of each level that were acknowledged.
        is_over: Memory in which another number than 0 ends the work.
    """
    with contextlib.suppress(gradserve.NotDurableError), gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        models = [accumulator(client, level) for level in LEVELS]
        number = 0
        while not is_over[0]:
            gradient = np.zeros((NUM_WORKERS, 3))
            gradient[rank] = 1, number, number**2
            number += 1
            for place, model in enumerate(models):
                model.apply_grad({"x": gradient}, NEVER_STALE)
                acknowledged[place] = number
        client.close(0)
