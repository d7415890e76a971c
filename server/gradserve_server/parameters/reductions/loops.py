"""The kernel that adds squares up exactly; see `exact`. Numba compiles it."""

from typing import Any

import numpy as np


def add_by_exponent(values: Any, low: Any, high: Any) -> None:
    """Adds the mantissas of values that have the same exponent.

    Args:
        values: uint64, the bits of float64 values of at least 0: at most 2^20.
        low: uint64 [2048]: by exponent, the sum of the lower 32 bits of mantissas.
        high: uint64 [2048]: that of the upper 21 bits.
    """
    for index in range(len(values)):
        bits = values[index]
        exponent = np.int64(bits >> np.uint64(52))
        mantissa = bits & np.uint64(0xFFFFFFFFFFFFF)
        if exponent:
            mantissa |= np.uint64(0x10000000000000)
        low[exponent] += mantissa & np.uint64(0xFFFFFFFF)
        high[exponent] += mantissa >> np.uint64(32)
