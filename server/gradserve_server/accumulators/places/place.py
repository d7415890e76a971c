"""Where the values of an accumulator are, and what computes on them there."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.wire.narrowing import converted
from gradserve_server.accumulators.gradient import Array, Gradient, SparseSlices
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.places.average_copies import AverageCopies
from gradserve_server.accumulators.private_copies import PrivateCopies
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Allocate
from gradserve_server.devices.reducer import Reducer
from gradserve_server.state.durability import Durability
from gradserve_server.tensors.quotas import Quota


@dataclass(frozen=True)
class Place:
    """The host's memory, in which accumulators are by default, and what computes there. Has nothing of any of them.

    Attributes:
        name: The name of the device, as in `AccumulatorSpec.device`.
        reducer: Computes.
        allocate: Allocates memory.
        compute: Runs the arithmetic.
        memory: The quota of bytes.
    """

    name: str
    reducer: Reducer
    allocate: Allocate
    compute: Compute
    memory: Quota

    has_sparse = True
    """Whether sparse components can be here."""

    takes_from_anywhere = False
    """Whether gradients may be in any memory when they are checked. Otherwise they are on the host."""

    @property
    def copies(self) -> PrivateCopies:
        """Copies gradients that others may change."""
        return PrivateCopies(self.reducer, self.allocate)

    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the dense components of a gradient that must be copied before they are added.

        Here those of a gradient that others may change, if it is checked.
        """
        return list(gradient.dense) if gradient.live and is_checked else []

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with such copies. Runs in any thread.

        Raises:
            MemoryError: There is not enough memory.
        """
        return self.copies.copy(gradient)

    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array of real numbers in another dtype. Runs in any thread.

        Raises:
            DoesNotFitError: A finite value would become infinite.
            MemoryError: There is not enough memory.
        """
        return converted(array, dtype)

    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, for messages. Runs in any thread."""
        return array[index]

    def may_be_written(self, array: Array) -> bool:
        """Returns True if nothing forbids to write to an array."""
        return bool(array.flags.writeable)

    def protect(self, array: Array) -> None:
        """Forbids to write to an array from now on."""
        array.flags.writeable = False

    def average_copies(self, host_memory: Quota, allocate: Any) -> AverageCopies:
        """Returns what copies the averages of one accumulator to other memory and back.

        Args:
            host_memory: The accumulator's quota of bytes on the host.
            allocate: Allocates an average's arrays on the host, given their shapes and dtypes.
        """
        return AverageCopies()

    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Quota
    ) -> AccumulatorJournal:
        """Returns a journal that takes gradients and averages from here.

        Args:
            journal: A journal that takes them from the host's memory.
            durability: What it writes.
            host_memory: The accumulator's quota of bytes on the host.
        """
        return journal


def only_dense(gradient: Gradient) -> dict[str, NDArray[Any]]:
    """Returns the values of a gradient that has no sparse ones."""
    assert not any(isinstance(value, SparseSlices) for value in gradient.values.values())
    return gradient.dense
