"""Accumulators in the memory of the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from gradserve.wire.arrays import converted
from gradserve_server.accumulators.gradient import Array, Gradient
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.places.average_copies import AllocateAverage, AverageCopies
from gradserve_server.accumulators.places.place import Place
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.security.identity import Identity
from gradserve_server.state.durability import Durability

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class HostPlace(Place):
    """The memory of the host; see `Place`.

    Attributes:
        memory: The quota of bytes.
    """

    memory: Quota

    has_sparse = True
    takes_from_anywhere = False

    def part(self, owner: Identity, container: str | None) -> Quota:
        """Returns the quota of bytes for an accumulator."""
        return self.memory.part(owner, container)

    async def grow(self, account: Account, amount: int, owner: Identity) -> None:
        """Takes more bytes."""
        account.grow(amount)

    async def attempt(
        self, num_bytes: int, owner: Identity, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs work."""
        return await self.compute.run(num_bytes, function, *args, **kwargs)

    def may_be_written(self, array: Array) -> bool:
        """Returns True if nothing forbids to write to an array."""
        return bool(array.flags.writeable)

    def protect(self, array: Array) -> None:
        """Forbids to write to an array from now on."""
        array.flags.writeable = False

    def copied(self, gradient: Gradient, *, is_checked: bool) -> list[str]:
        """Returns the components of a gradient that others may change, if it is checked."""
        return list(gradient.dense) if gradient.live and is_checked else []

    def copy(self, gradient: Gradient) -> Gradient:
        """Returns a gradient with copies of all dense values."""
        return self.copies.copy(gradient)

    def converted(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns an array of real numbers in another dtype."""
        return converted(array, dtype)

    def element(self, array: Array, index: tuple[int, ...]) -> Any:
        """Returns an element, for messages."""
        return array[index]

    def average_copies(self, host_memory: Quota, allocate: AllocateAverage) -> AverageCopies:
        """Returns what copies nothing."""
        return AverageCopies()

    def journal(
        self, journal: AccumulatorJournal, durability: Durability | None, host_memory: Quota
    ) -> AccumulatorJournal:
        """Returns the journal itself."""
        return journal
