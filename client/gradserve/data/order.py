"""The order of the samples of an epoch, computed for single places of it, without memory for the others."""

import hashlib
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 16
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def samples_at(places: NDArray[np.uint64], num_samples: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Returns the samples at some places of an epoch: of all places, a permutation, the same on every machine.

    It is a Feistel network over the rows and columns of the smallest rectangle, nearly a square, that has room for all
    samples: columns are moved by a random number of their row, rows by one of their column, and so on. A place that
    ends where there is no sample goes through it again.

    Args:
        places: Numbers from 0 to num_samples - 1, uint64, of any shape.
        num_samples: The number of samples, below 2^40.
        seed: Chooses the orders of all epochs.
        epoch: The number of the epoch.

    Returns:
        The numbers of the samples, of the same shape.
    """
    width = isqrt(num_samples - 1) + 1
    height = -(-num_samples // width)
    keys = _keys(seed, epoch)
    samples = _moved(places, np.uint64(width), np.uint64(height), keys)
    while (is_outside := samples >= num_samples).any():
        samples[is_outside] = _moved(samples[is_outside], np.uint64(width), np.uint64(height), keys)
    return samples


def _moved(
    places: NDArray[np.uint64], width: np.uint64, height: np.uint64, keys: tuple[np.uint64, ...]
) -> NDArray[np.uint64]:
    rows, columns = np.divmod(places, width)
    for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
        columns = (columns + _random(rows, row_key)) % width
        rows = (rows + _random(columns, column_key)) % height
    return rows * width + columns


def _random(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Returns random numbers below 2^32 that follow from numbers and a key."""
    mixed = (numbers ^ key) * _FACTORS[0]
    return ((mixed ^ (mixed >> _HALF)) * _FACTORS[1]) >> _HALF


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    text = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * _NUM_ROUNDS)
    return tuple(np.frombuffer(text, "<u8").astype(np.uint64))
