"""Exact sums of float64 numbers, which do not depend on their order, or on where a part of them is added up.

A sum is kept as `Terms`: floats whose exact sum it is, usually two or three. It is rounded once, by `rounded`. So an
update has the same norm to the last bit in any number of pieces on any number of servers.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import Declared, Kernel, KernelTable, PreparedKernels
from gradserve_server.devices.host.loading import KernelLoader

Terms: TypeAlias = tuple[float, ...]
"""At least one float; their exact sum is meant. It is infinite if an infinite number or NaN was added."""

_MOST_BITS = 16
"""At most 2^16 values are added at once by NumPy."""
_MANTISSA_BITS = 53
_LARGEST_EXPONENT = 1000
_NOT_FINITE = 2047
_SCALES = np.maximum(np.arange(2048), 1) - 1075
"""By the bits of an exponent, that of the last bit of a mantissa."""


@dataclass(frozen=True)
class Kernels:
    """The kernel; see `loops`."""

    add_by_exponent: Kernel


EXACT_SUMS = KernelTable(
    what="exact sums",
    package=__package__,
    kernels=Kernels,
    types={np.dtype(np.float64): {}},
    declared={"add_by_exponent": Declared("loops.add_by_exponent", "const uint64[], uint64[], uint64[]")},
    contract=False,
)


class ExactSums:
    """Adds numbers up: by NumPy, or twelve times as fast by a kernel, once that is prepared. Both find the same."""

    def __init__(self, loader: KernelLoader | None = None) -> None:
        """Has the loader load the kernel when sums ask for it; without one, only `prepare` does."""
        self._kernels = PreparedKernels(EXACT_SUMS, loader=loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles the kernel, or loads it from a cache, unless `stop()`."""
        self._kernels.prepare(stop)

    def of_rows(self, rows: NDArray[np.float64]) -> list[Terms]:
        """Returns the sum of each row of numbers of at least 0, at most 2^16 in a row. Changes the rows."""
        kernels = self._kernels.get(rows.dtype)
        return [_sum_by_numpy(row) if kernels is None else _sum_compiled(kernels, row) for row in rows]


def sums(rows: Iterable[Iterable[Terms]]) -> list[Terms]:
    """Returns the sums of columns; no columns without rows."""
    return [_shortened([term for terms in column for term in terms]) for column in zip(*rows, strict=True)]


def rounded(*parts: Terms) -> float:
    """Returns the float64 nearest to the sum of all parts; infinity if it is above all of them."""
    try:
        return math.fsum([term for terms in parts for term in terms])
    except OverflowError:
        return math.inf


def _shortened(terms: list[float]) -> Terms:
    """Returns a sum in as few terms as possible, the greatest first."""
    found: list[float] = []
    rest = terms
    while not found or found[-1]:
        value = rounded(tuple(rest))
        if not math.isfinite(value):
            return (math.inf,)
        found.append(value)
        rest = [*rest, -value]
    return tuple(found[:-1]) or (0.0,)


def _sum_compiled(kernels: Kernels, row: NDArray[np.float64]) -> Terms:
    low, high = np.zeros(2048, np.uint64), np.zeros(2048, np.uint64)
    kernels.add_by_exponent(row.view(np.uint64), low, high)
    if high[_NOT_FINITE]:
        return (math.inf,)
    used = np.flatnonzero(low | high)
    with np.errstate(all="ignore"):
        lower, upper = np.ldexp(low[used], _SCALES[used]), np.ldexp(high[used], _SCALES[used] + 32)
    return _shortened([*lower.tolist(), *upper.tolist()])


def _sum_by_numpy(row: NDArray[np.float64]) -> Terms:
    """Takes the same leading bits of all values at a time, so few that no addition of these rounds."""
    greatest = float(row.max(initial=0.0))
    if not math.isfinite(greatest):
        return (math.inf,)
    exponent = math.frexp(greatest)[1]
    if exponent > _LARGEST_EXPONENT:
        return _shortened(row.tolist())
    terms = []
    leading = np.empty_like(row)
    while row.any():
        step = math.ldexp(1.0, exponent + _MOST_BITS + 1)
        np.add(row, step, out=leading)
        leading -= step
        row -= leading
        terms.append(float(leading.sum()))
        exponent -= _MANTISSA_BITS - _MOST_BITS - 2
    return _shortened(terms)
