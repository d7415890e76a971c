"""Where the values of an accumulator are, and what computes on them there."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np

from gradserve_server.accumulators.gradient import Array, Gradient
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.places.average_copies import AllocateAverage, AverageCopies
from gradserve_server.accumulators.private_copies import PrivateCopies
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Allocate
from gradserve_server.devices.reducer import Reducer
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.security.identity import Identity
from gradserve_server.state.durability import Durability

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Place(ABC):
    """Memory in which accumulators are, and what computes there. It has nothing of any of them.

    Attributes:
        name: The name of the device, as in `AccumulatorSpec.device`.
        reducer: Computes.
        allocate: Allocates memory.
        compute: Runs the arithmetic.
        has_sparse: Whether sparse components can be here.
        takes_from_anywhere: Whether gradients may be in any memory when they are checked; otherwise they are on the
            host.
    """

    name: str
    reducer: Reducer
    allocate: Allocate
    compute: Compute

    has_sparse: ClassVar[bool]
    takes_from_anywhere: ClassVar[bool]

    @property
    def copies(self) -> PrivateCopies:
        """Copies gradients that others may change."""
        return PrivateCopies(self.reducer, self.allocate)

    # Memory

    @abstractmethod
    def part(self, owner: Identity, container: str | None) -> Quota:
        """Returns the quota of bytes for an accumulator; see `Quota.part`."""

    @abstractmethod
    async def grow(self, account: Account, amount: int, owner: Identity) -> None:
        """Takes more bytes for an accumulator of an identity.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """

    @abstractmethod
    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work on `num_bytes` of data that allocates memory, and that can begin again.

        Raises:
            MemoryError: There is not enough memory.
            ResourceExhaustedError: Likewise.
        """

    @abstractmethod
    def may_be_written(self, array: Array) -> bool:
        """Returns True if nothing forbids to write to an array."""

    @abstractmethod
    def protect(self, array: Array) -> None:
        """Forbids to write to an array from now on."""

    # Gradients. These run in any thread.

    @abstractmethod
    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the dense components of a gradient that must be copied before they are added.

        Args:
            gradient: The gradient.
            is_checked: Whether its values are looked at before.
        """

    @abstractmethod
    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with such copies.

        Raises:
            MemoryError: There is not enough memory.
        """

    @abstractmethod
    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array of real numbers in another dtype.

        Raises:
            DoesNotFitError: A finite value would become infinite.
            MemoryError: There is not enough memory.
        """

    @abstractmethod
    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, for messages."""

    # What is needed on the host

    @abstractmethod
    def average_copies(self, host_memory: Quota, allocate: AllocateAverage) -> AverageCopies:
        """Returns what copies the averages of one accumulator to other memory and back.

        Args:
            host_memory: The accumulator's quota of bytes on the host.
            allocate: Allocates an average's arrays on the host.
        """

    @abstractmethod
    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Quota
    ) -> AccumulatorJournal:
        """Returns a journal that takes gradients and averages from here.

        Args:
            journal: A journal that takes them from the host's memory.
            durability: What it writes.
            host_memory: The accumulator's quota of bytes on the host.
        """
