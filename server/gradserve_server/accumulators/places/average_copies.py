"""Copies of averages in other memory than theirs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradserve_server.accumulators.gradient import Array, HostCopy, Value

AllocateAverage = Callable[[Sequence[tuple[tuple[int, ...], np.dtype[Any]]]], list[Array]]
"""Returns arrays in host memory, where others read them in place if there are such readers."""


class AverageCopies:
    """Copies the averages of an accumulator on the host: there is nothing to copy."""

    def host_copy(self, values: Mapping[str, Value]) -> HostCopy | None:
        """Returns the copy of an average in host memory, not made yet; None if it is there already."""
        return None

    async def brought(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Returns the values of an average, which are on the host, where averages of this accumulator are.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        return values
