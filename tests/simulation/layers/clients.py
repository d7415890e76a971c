"""Workers that do all that workers may do with layers, and check each answer."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.layers.batch_norm.config import UPDATE_OPS, BatchNormConfig, RandomAdjustment
from gradserve_server.layers.batch_norm.layer import ForwardCall
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.layers.bench import config_of
from tests.simulation.layers.moments import CHANNELS, DECAY, batch_of
from tests.simulation.layers.truth import Forward, LayerLife
from tests.simulation.network import LostError
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.layers.part import Layers

T = TypeVar("T")

CONTAINER = "layers"
KEYS = [ResourceKey(CONTAINER, name) for name in ("a", "b")]


class LayerClient:
    """One worker. What it has sent outlives the server."""

    def __init__(self, name: str, part: "Layers", chance: random.Random) -> None:
        self.name = name
        self._part = part
        self._world = part.world
        self._chance = chance
        self._next = 0
        self._latest: list[tuple[LayerLife, Forward]] = []
        """The forwards that it may send again, or compute the gradients of."""

    async def work(self) -> None:
        """Asks for one thing after the other, until the world ends."""
        actions: list[tuple[float, Any]] = [
            (0.40, self._new_forward),
            (0.30, self._forward_again),
            (0.15, self._backward),
            (0.20, self._run_updates),
            (0.08, self._set),
            (0.06, self._release),
            (0.01, self._delete),
        ]
        weights = [weight for weight, _ in actions]
        while not self._world.is_over:
            await asyncio.sleep(self._chance.choice([0.0, 0.001, 0.05, 0.3]))
            (_, action) = self._chance.choices(actions, weights)[0]
            await action()

    # Layers

    async def _life(self) -> LayerLife | None:
        """Returns a layer, which is made if it is not there."""
        key = self._chance.choice(KEYS)
        registry = self._world.server.layers
        try:
            layer = registry.get(key)
        except NotFoundError:
            await self._ask(self._create(key), None, f"create {key}")
            return None
        life = self._part.lives[layer.incarnation]
        return life if life.is_promised else None

    async def _create(self, key: ResourceKey) -> None:
        registry, chance = self._world.server.layers, self._chance
        config = _config(chance)
        if chance.random() < 0.5:
            shape = (np.dtype(np.float32), (-1, CHANNELS))
            layer, is_new = await registry.create_built(key, config, Reuse.ALLOWED, "", *shape)
        else:
            layer, is_new = registry.create(key, config, Reuse.ALLOWED, "")
        if is_new:
            assert layer.config.durability is not None
            draws = config.adjustment is not None
            life = LayerLife(key, layer.incarnation, layer.config.durability, config.in_place_updates, draws)
            self._part.lives[life.incarnation] = life
            self._world.note(f"{self.name} creates {key}: {life.durability.name}{' in place' * life.in_place}")
        await registry.settle()
        if is_new and not self._world.is_over and self._world.server.failure is None:
            life.is_promised = True

    async def _delete(self) -> None:
        life = await self._life()
        if life is None:
            return
        life.deleting = True
        self._world.note(f"{self.name} deletes {life.key}")
        registry = self._world.server.layers
        registry.delete(life.key, life.incarnation)
        done = await self._ask(registry.settle(), life, f"delete {life.key}")
        if done and not self._world.is_over:
            life.is_deleted = True

    # Forwards

    async def _new_forward(self) -> None:
        life = await self._life()
        if life is None or len(life.forwards) == CHANNELS:
            return
        forward = life.new_forward(f"{self.name}:{self._next}", self._chance.choice([2.0, 4.0, 600.0]))
        self._next += 1
        self._latest = [*self._latest[-3:], (life, forward)]
        await self._send_forward(life, forward)

    async def _forward_again(self) -> None:
        if self._latest:
            life, forward = self._chance.choice(self._latest)
            if forward.must_be_remembered:
                await self._send_forward(life, forward)

    async def _send_forward(self, life: LayerLife, forward: Forward) -> None:
        world, chance = self._world, self._chance
        keeps = chance.random() < 0.5
        released = [chance.choice(self._latest)[1].forward_id] if chance.random() < 0.1 else []
        call = ForwardCall(True, forward.forward_id, keeps, forward.lease, released)

        async def serve() -> bool:
            begun = world.moment
            with world.server.layers.use(life.key, life.incarnation) as layer:
                life.arrived(forward, [each.forward_id for each in layer.forwards])
                forward.num_using += 1
                try:
                    result = await layer.forward(CallInputs(batch_of(forward.number)), call, on_host=True)
                    if not world.is_over and not life.deleting:
                        life.observe(layer, world.moment)
                        life.answered(forward, begun, result)
                finally:
                    forward.num_using -= 1
                    forward.used = world.moment
            return True

        await self._send(serve, life, f"forward {forward} of {life.key}")

    async def _backward(self) -> None:
        if not self._latest:
            return
        life, forward = self._chance.choice(self._latest)
        retain = self._chance.random() < 0.3
        world = self._world

        async def serve() -> bool:
            with world.server.layers.use(life.key, life.incarnation) as layer:
                forward.num_using += 1
                try:
                    call = layer.check_backward(forward.forward_id, batch_of(forward.number))
                    await layer.backward(call, retain=retain, on_host=True)
                finally:
                    forward.num_using -= 1
                    forward.used = world.moment
            return True

        await self._send(serve, life, f"backward {forward} of {life.key}", may_be_lost=True)

    async def _run_updates(self) -> None:
        life = await self._life()
        if life is None:
            return
        world, registry = self._world, self._world.server.layers
        named = [forward.forward_id for each, forward in self._latest if each is life]
        forward_ids = named if self._chance.random() < 0.5 else []
        of_all = self._chance.random() < 0.3

        async def serve() -> bool:
            if of_all:
                await registry.run_updates(CONTAINER, UPDATE_OPS, forward_ids)
                return True
            with registry.use(life.key, life.incarnation) as layer:
                before = set(life.pending)
                await layer.run_updates(forward_ids)
                if not forward_ids and not world.is_over and not life.deleting:
                    life.observe(layer, world.moment)
                    left = before & life.pending.keys()
                    again = {each for each in left if life.forwards[each].num_using}
                    check(left == again, f"{life.key}: the updates of {sorted(left)} were to be run, and are pending")
            return True

        await self._send(serve, life, f"run updates {forward_ids or 'all'} of {life.key}")

    async def _set(self) -> None:
        life = await self._life()
        if life is None:
            return
        world = self._world
        life.num_sets += 1
        value, resets = life.num_sets, self._chance.random() < 0.3
        values = {"beta": np.full(CHANNELS, value, np.float32)}
        if resets:
            values["moving_mean"] = np.zeros(CHANNELS, np.float32)

        async def serve() -> bool:
            with world.server.layers.use(life.key, life.incarnation) as layer:
                if layer.variables is None or value in life.values:
                    return False  # a second copy has no id by which it is known
                life.values[value] = resets
                await layer.set_variables(values)
                if not world.is_over and not life.deleting:
                    life.observe(layer, world.moment)
                    life.was_set(value)
            return True

        await self._send(serve, life, f"set beta of {life.key} to {value}{', and the mean to 0' * resets}")

    async def _release(self) -> None:
        if not self._latest:
            return
        life, forward = self._chance.choice(self._latest)
        with_updates = self._chance.random() < 0.5
        world = self._world

        async def serve() -> bool:
            with world.server.layers.use(life.key, life.incarnation) as layer:
                was_pending = forward.number in life.pending
                await layer.release([forward.forward_id], with_updates=with_updates)
                life.observe(layer, world.moment)
                if with_updates and was_pending and forward.number not in life.counted and not world.is_over:
                    life.dropped.add(forward.number)
            return True

        if with_updates:
            life.dropping.add(forward.number)
        await self._send(serve, life, f"release {forward} of {life.key}{' with its update' * with_updates}")

    # The network

    async def _send(
        self, serve: Callable[[], Awaitable[T]], life: LayerLife, what: str, *, may_be_lost: bool = False
    ) -> None:
        world = self._world
        world.note(f"{self.name}: {what}")
        patience = self._chance.choice([0.01, 0.2]) if self._chance.random() < 0.15 else 5.0

        async def answered() -> bool:
            return await self._ask(serve(), life, what, may_be_lost=may_be_lost)

        try:
            await world.network.ask(self.name, answered, patience)
        except LostError:
            world.note(f"{what}: no answer within {patience:g} s")

    async def _ask(
        self, work: Awaitable[object], life: LayerLife | None, what: str, *, may_be_lost: bool = False
    ) -> bool:
        """Waits for an answer of the server; returns False if it is an error that is allowed."""
        world = self._world
        try:
            await work
        except ServiceError as error:
            if world.is_over:
                return False
            world.note(f"{what}: {type(error).__name__}")
            is_missing = isinstance(error, NotFoundError | AbortedError)
            is_gone = is_missing and life is not None and life.deleting
            exists = isinstance(error, AlreadyExistsError) and life is None  # of two that were built at once
            is_full = isinstance(error, ResourceExhaustedError) and world.was_full
            has_failed = isinstance(error, UnavailableError) and world.server.failure is not None
            is_allowed = is_gone or exists or is_full or has_failed or (is_missing and may_be_lost)
            check(is_allowed, f"{what}: {type(error).__name__}: {error}")
            return False
        return True


def _config(chance: random.Random) -> BatchNormConfig:
    """Returns a configuration whose moving mean tells forwards apart."""
    in_place = chance.random() < 0.5
    draws = not in_place and chance.random() < 0.5
    return config_of(
        decay=DECAY,
        fused=False,
        updates_collections=None if in_place else UPDATE_OPS,
        adjustment=RandomAdjustment((0.5, 1.5), (-1.0, 1.0)) if draws else None,
        durability=chance.choice([Durability.NONE, Durability.ROUND, Durability.GRADIENT]),
    )
