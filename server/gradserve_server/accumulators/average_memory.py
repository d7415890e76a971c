"""Memory for averages that others read in place."""

from collections.abc import Sequence
from typing import Protocol

from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.spec import DType


class AverageMemory(Protocol):
    """Allocates averages where workers on this machine read them in place.

    Attributes:
        takes_sums: Whether gradients may be added up there, too, which takes less memory and time. Whoever can read an
            average may then see sums that are not finished.
    """

    @property
    def takes_sums(self) -> bool: ...  # noqa: D102

    def arrays(self, specs: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array] | None:
        """Returns writable C-contiguous arrays in one block of memory, or None if nobody would read them in place.

        The accumulator writes them once, and makes them read-only. Called in any thread.

        Args:
            specs: The shape and dtype of each array.

        Raises:
            MemoryError: There is not enough memory. The sums are divided in place then.
            ResourceExhaustedError: A quota is used up; likewise.
        """
        ...


class NoAverageMemory:
    """For accumulators whose averages nobody reads in place."""

    takes_sums = False

    def arrays(self, specs: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array] | None:
        """Returns None: the sums are divided in place."""
        return None
