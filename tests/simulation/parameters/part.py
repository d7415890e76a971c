"""The parameters of a simulated world."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.errors import NotFoundError
from gradserve_server.parameters.parameters import Parameters as Real
from tests.accumulators.bench import opened
from tests.simulation.parameters.calls import Call
from tests.simulation.parameters.clients import KEYS, Client
from tests.simulation.parameters.timing import Served, Timing
from tests.simulation.parameters.truth import Creation, Life
from tests.simulation.parameters.updates import mark_of, update_of, weight_of
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.world import World

_LONGEST_ROUND = 20.0
"""Seconds after which every round that has enough updates is over."""


class Parameters:
    """Shared parameters, and workers that do all that workers and chiefs may.

    Attributes:
        lives: The parameters, by incarnation.
        creations: All calls that have created some.
        num_updates: The number of updates so far.
        num_marks: The number of creations, loads and changes so far.
    """

    name: str = "parameters"
    things: tuple[str, ...] = ("updates", "waiters", "writes")

    def __init__(self, world: "World", chance: random.Random) -> None:
        self.world = world
        self.lives: dict[str, Life] = {}
        self.creations: list[Creation] = []
        self.num_updates = 0
        self.num_marks = 0
        self._served = Served()
        self._clients = [Client(f"p{number}", self, chance) for number in range(3)]

    @property
    def clients(self) -> Sequence[str]:
        """See `Part`."""
        return [each.name for each in self._clients]

    def new_update(self) -> int:
        """Returns the number of a new update."""
        self.num_updates += 1
        return self.num_updates - 1

    def new_mark(self) -> int:
        """Returns a number that no other creation, load or change has."""
        self.num_marks += 1
        return self.num_marks

    def life_of(self, parameters: Real) -> Life:
        """Returns what is known of parameters, which were seen before."""
        return self.lives[parameters.incarnation]

    def present(self) -> Collection[str]:
        """See `Part`."""
        server = self.world.server
        there = {
            "updates": any(each.rounds.num_accumulated for _, each in server.parameters.all()),
            "waiters": bool(server.parameters.factory.waiters.used),
            "writes": not server.store.is_idle,
        }
        return [name for name, is_there in there.items() if is_there]

    def recovered(self) -> None:
        """See `Part`."""
        self._served.begin(self.world.moment)
        found = dict(self.world.server.parameters.all())
        self.world.note(f"it finds {', '.join(map(str, found)) or 'no parameters'}")
        for parameters in found.values():
            life = self.lives.get(parameters.incarnation) or self._begin(parameters)
            check(not life.is_deleted, f"{life.key}: they were deleted, and are here again")
            life.deleting, life.ended_at, life.is_promised = False, None, True
            life.recovered(parameters, self.world.epoch)
        there = {each.incarnation for each in found.values()}
        for life in self.lives.values():
            if life.incarnation not in there:
                check(life.deleting or not life.is_promised, f"{life.key}: they are gone")
                life.is_deleted = life.deleting = True

    def _begin(self, parameters: Real) -> Life:
        """Returns a life of parameters that are seen for the first time."""
        key = next(key for key, each in self.world.server.parameters.all() if each is parameters)
        mark, spec = mark_of(parameters.newest.values), parameters._spec
        found = [each for each in self.creations if each.key == key and _is_first_of(each, mark, parameters)]
        check(found, f"{key}: nobody has created parameters with mark {mark} and {spec}")
        life = Life(key, parameters.incarnation, spec, Timing(self._served))
        self.lives[parameters.incarnation] = life
        life.begin(parameters, found, self.world.epoch)
        return life

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """See `Part`."""
        return [each.work for each in self._clients]

    def observe(self, is_quiet: bool) -> None:
        """See `Part`."""
        server = self.world.server
        self._served.look(self.world.moment)
        for key, parameters in server.parameters.all():
            life = self.lives.get(parameters.incarnation) or self._begin(parameters)
            life.observe(parameters, self.world.epoch)
            if is_quiet and server.store.is_idle and not self.world.was_full:
                life.timing.check_due(len(life.pending), life.round_rules.rounds, str(key))

    async def finish(self) -> None:
        """Ends the rounds, checks what was in them, and deletes everything."""
        registry = self.world.server.parameters
        for key in KEYS:
            try:
                parameters = registry.get(key)
            except NotFoundError:
                continue
            life = self.life_of(parameters)
            await self._end_round(parameters, life)
            life.observe(parameters, self.world.epoch)
            check(not life.pending, f"{life.key}: a round with {life.pending} goes on, by {life.round_rules}")
            for call in life.calls.all:
                life.calls.check_counted(call)
        for key in KEYS:
            registry.delete(key)

    async def _end_round(self, parameters: Real, life: Life) -> None:
        """Pushes as many updates as a round needs that has begun."""
        num_required = life.round_rules.rounds.num_required
        for place in range(num_required if parameters.rounds.num_accumulated else 0):
            if not 0 < parameters.rounds.num_accumulated < num_required:
                break
            number = self.new_update()
            contribution = Contribution(life.step, weight_of(number), f"finisher {place}", number)
            life.calls.add(Call("push", "finisher", place, life, number, contribution))
            await parameters.push(None, contribution, opened(update_of(number, life.spec, is_given_away=False)))
        if parameters.rounds.num_accumulated:
            await asyncio.sleep(_LONGEST_ROUND)


def _is_first_of(creation: Creation, mark: int, parameters: Real) -> bool:
    """Returns True if parameters are those of a creation."""
    if creation.values is not None and creation.spec is not None:
        return mark_of(creation.values) == mark and creation.spec.rules == parameters._spec.rules
    newest, source = parameters.newest, creation.source
    assert source is not None
    return creation.step in (None, newest.step) and source.had(newest)
