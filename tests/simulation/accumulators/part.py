"""The accumulators of a simulated world."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

from gradserve_server.errors import NotFoundError
from tests.simulation.accumulators.clients import KEYS, Client
from tests.simulation.accumulators.truth import Life
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.world import World


class Accumulators:
    """Shared accumulators, and workers that do all that workers may.

    Attributes:
        lives: The accumulators, by incarnation.
        num_gradients: The number of gradients so far.
    """

    name: str = "accumulators"
    things: tuple[str, ...] = ("gradients", "waiters", "writes")

    def __init__(self, world: "World", chance: random.Random) -> None:
        self.world = world
        self.lives: dict[str, Life] = {}
        self.num_gradients = 0
        self._clients = [Client(f"w{number}", self, chance) for number in range(3)]

    @property
    def clients(self) -> Sequence[str]:
        """See `Part`."""
        return [each.name for each in self._clients]

    def new_gradient(self) -> int:
        """Returns the number of a new gradient."""
        self.num_gradients += 1
        return self.num_gradients - 1

    def present(self) -> Collection[str]:
        """See `Part`."""
        server = self.world.server
        there = {
            "gradients": any(each.num_accumulated for _, each in server.accumulators.page("test", "", 100)),
            "waiters": bool(server.accumulators.factory.waiters.used),
            "writes": not server.store.is_idle,
        }
        return [name for name, is_there in there.items() if is_there]

    def recovered(self) -> None:
        """See `Part`."""
        found = dict(self.world.server.accumulators.page("test", "", 100))
        self.world.note(f"it finds {', '.join(map(str, found)) or 'no accumulators'}")
        there = {each.incarnation: each for each in found.values()}
        for incarnation, accumulator in there.items():
            check(incarnation in self.lives, f"{incarnation} was never made")
            life = self.lives[incarnation]
            check(not life.is_deleted, f"{life.key}: it was deleted, and is here again")
            life.deleting = False
            life.ended_at = None
            life.is_promised = True
            life.recovered(accumulator, self.world.epoch)
            life.setting.clear()
        for life in self.lives.values():
            if life.incarnation not in there:
                check(life.deleting or not life.is_promised, f"{life.key}: it is gone")
                life.is_deleted = life.deleting = True

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """See `Part`."""
        return [each.work for each in self._clients]

    def observe(self, is_quiet: bool) -> None:
        """See `Part`."""
        server = self.world.server
        for _, accumulator in server.accumulators.page("test", "", 100):
            self.lives[accumulator.incarnation].observe(accumulator, self.world.epoch)
            if is_quiet and server.store.is_idle and not server.disk.is_full:
                head = accumulator.queue.head(accumulator.rounds.members)
                check(head is None, f"{accumulator.name}: a call waits, but enough gradients are there")

    async def finish(self) -> None:
        """Ends the rounds, checks what was in them, and deletes everything."""
        registry = self.world.server.accumulators
        for key in KEYS:
            try:
                accumulator = registry.get(key)
            except NotFoundError:
                continue
            if accumulator.num_accumulated:
                await accumulator.take(None, accumulator.num_accumulated, 60)
            await asyncio.sleep(1)
            life = self.lives[accumulator.incarnation]
            for call in life.calls:
                life.check_counted(call)
        for key in KEYS:
            registry.delete(key)
