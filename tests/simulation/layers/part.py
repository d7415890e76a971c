"""The layers of a simulated world."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.simulation.layers.clients import CONTAINER, KEYS, LayerClient
from tests.simulation.layers.truth import LayerLife
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.world import World


class Layers:
    """Shared batch normalization layers, and workers that do all that workers may.

    Attributes:
        lives: The layers, by incarnation.
    """

    name: str = "layers"
    things: tuple[str, ...] = ("pending updates", "forwards", "writes")

    def __init__(self, world: "World", chance: random.Random) -> None:
        self.world = world
        self.lives: dict[str, LayerLife] = {}
        self._clients = [LayerClient(f"l{number}", self, chance) for number in range(3)]

    @property
    def clients(self) -> Sequence[str]:
        """See `Part`."""
        return [each.name for each in self._clients]

    def present(self) -> Collection[str]:
        """See `Part`."""
        lives = self.lives.values()
        there = {
            "pending updates": any(life.pending for life in lives if not life.is_deleted),
            "forwards": any(each.num_using for life in lives for each in life.forwards.values()),
            "writes": not self.world.server.store.is_idle,
        }
        return [name for name, is_there in there.items() if is_there]

    def recovered(self) -> None:
        """See `Part`."""
        found = self._found()
        there = {layer.incarnation: layer for _, layer in found}
        self.world.note(f"it finds {', '.join(str(key) for key, _ in found) or 'no layers'}")
        for incarnation, layer in there.items():
            check(incarnation in self.lives, f"{incarnation} was never made")
            life = self.lives[incarnation]
            check(not life.is_deleted, f"{life.key}: it was deleted, and is here again")
            life.deleting, life.is_promised = False, True
            life.recovered(layer, self.world.moment)
        for life in self.lives.values():
            if life.incarnation not in there:
                may_be_gone = life.deleting or not life.is_promised or life.durability is Durability.NONE
                check(may_be_gone, f"{life.key}: it is gone")
                life.is_deleted = life.deleting = True

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """See `Part`."""
        return [each.work for each in self._clients]

    def observe(self, is_quiet: bool) -> None:
        """See `Part`."""
        for _, layer in self._found():
            life = self.lives[layer.incarnation]
            life.observe(layer, self.world.moment)
            if is_quiet:
                life.check_leases(layer, self.world.moment)

    async def finish(self) -> None:
        """Runs the updates that are pending, and deletes everything."""
        for _, layer in self._found():
            life = self.lives[layer.incarnation]
            pending = set(life.pending)
            await layer.run_updates(())
            life.observe(layer, self.world.moment)
            check(pending <= life.counted and not life.pending, f"{life.key}: of {pending} some were not counted")
        await asyncio.sleep(0)
        for key in KEYS:
            self.world.server.layers.delete(key)

    def _found(self) -> list[tuple[ResourceKey, BatchNormLayer]]:
        return [(key, layer) for key, layer in self.world.server.layers._layers if key.container == CONTAINER]
