"""What leases end in a simulated world."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.leases.owners import CONTAINER, Owner
from tests.simulation.leases.truth import LeaseTruth
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.world import World

_LONGEST = 15.0
"""Seconds after which all leases have ended that nobody renews."""


class Leases:
    """Clients that own accumulators, layers and stored tensors, and die.

    Attributes:
        truth: What they have been given, and when it has to end.
    """

    name: str = "leases"
    things: tuple[str, ...] = ("tensors", "leases in use", "leases that run out")

    def __init__(self, world: "World", chance: random.Random) -> None:
        self.world = world
        self.truth = LeaseTruth(lambda: world.moment)
        self._owners = [Owner(f"o{number}", self, chance) for number in range(3)]

    @property
    def clients(self) -> Sequence[str]:
        """See `Part`."""
        return [each.name for each in self._owners]

    def present(self) -> Collection[str]:
        """See `Part`."""
        in_use = [bool(lease.num_users) for lease in self.truth.clients.values()]
        there = {
            "tensors": bool(self.truth.tensors),
            "leases in use": any(in_use),
            "leases that run out": False in in_use,
        }
        return [name for name, is_there in there.items() if is_there]

    def recovered(self) -> None:
        """See `Part`."""
        self.world.server.tensors.watch = self.truth
        self.truth.recovered(self._there())

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """See `Part`."""
        return [each.work for each in self._owners]

    def observe(self, is_quiet: bool) -> None:
        """See `Part`."""
        self.look()
        if is_quiet:
            self.truth.check_ends(self.world.server.tensors._entries)

    def look(self) -> None:
        """Looks at what is there."""
        self.truth.observe(self.world.server.tensors._entries, self._there())

    async def finish(self) -> None:
        """Lets all leases end."""
        await asyncio.sleep(_LONGEST)
        left = [*self._there(), *self.world.server.tensors._entries]
        check(not left, f"{left} are there, though nobody uses them")

    def _there(self) -> Mapping[str, Any]:
        server = self.world.server
        found = [*server.accumulators._directory, *server.layers._layers]
        return {each.incarnation: each for key, each in found if key.container == CONTAINER}
