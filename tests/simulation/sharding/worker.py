"""A worker with a real client of all servers: it does all that workers may, dies, and comes back as another one."""

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gradserve
import gradserve.aio
from gradserve.calls.accumulators.sharding.shard import is_of_earlier
from gradserve.calls.client import ClientCalls
from gradserve.calls.identity import CallId, RequestIds
from gradserve.calls.server import Cluster
from tests.servers.connecting import aio_client_over
from tests.simulation.promises import BrokenPromiseError, check
from tests.simulation.sharding.transport import TIMES, SimulatedTransport
from tests.simulation.sharding.truth import SHAPES, gradient_of

if TYPE_CHECKING:
    from tests.simulation.sharding.world import World

NAMES = ("a", "b")
LOST_FIELD = "average.parts.part_ids"
_LONGEST = 150.0
"""Seconds after which every call must have ended, whatever the network does: some make several calls one after the
other, each with retries."""
MODEL = {name: gradserve.DenseSpec("float32", shape) for name, shape in SHAPES.items()}


class Worker:
    """One worker, with one client after the other."""

    def __init__(self, name: str, world: "World", chance: random.Random) -> None:
        self.name = name
        self._world = world
        self._chance = chance
        self._generation = 0
        self._is_slow = world.is_calm and chance.random() < 0.5
        self._failed: list[tuple[str, CallId, int, int, int]] = []
        """The calls with a gradient that have failed: accumulator, id of the call, number of the gradient, step, and
        how many gradients they wait for; 0 for those that do not wait."""
        self._begin()

    def _begin(self) -> None:
        """Makes a client that the servers have never heard of."""
        self._generation += 1
        self._worker_id = f"{self.name}.{self._generation}"
        network = self._world.network
        self.transport = SimulatedTransport(self.name, network, self._world.truth, self._pause)
        self._ids = RequestIds(f"{self._chance.getrandbits(64):x}")
        addresses = [f"server {target}" for target in range(len(network.runs))]
        calls = ClientCalls(self._ids, TIMES, cluster=Cluster(addresses))
        self.client = aio_client_over(self.transport, ",".join(addresses), calls)
        self.opened: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        self._failed.clear()

    async def work(self) -> None:
        """Does one thing after the other, until it is cancelled."""
        actions = self._actions()
        weights = [weight for weight, _ in actions]
        while True:
            await asyncio.sleep(self._chance.choice([0.0, 0.001, 0.05, 0.0 if self._world.is_calm else 0.3]))
            ((_, action),) = self._chance.choices(actions, weights)
            doing = asyncio.ensure_future(self._tried(action))
            if self._chance.random() < 0.03:
                await asyncio.wait([doing], timeout=self._chance.choice([0.0, 0.02, 0.3, 1.0]))
                await self._die(doing)
            else:
                try:
                    await doing
                finally:
                    doing.cancel()

    def _actions(self) -> list[tuple[float, Any]]:
        """Returns what the worker does, and how often."""
        actions: list[tuple[float, Any]] = [
            (0.35, self._push_pull),
            (0.25, self._apply),
            (0.12, self._take),
            (0.3 if self._world.is_calm else 0.12, self._read),
            (0.10, self._send_again),
            (0.1 if self._world.is_calm else 0.03, self._set_step),
            (self._world.deletions, self._delete),
            (0.015, self._private),
        ]
        if self._world.is_calm:
            actions.append((0.2, self._repeat_old_decision))
        return actions

    def _pause(self) -> float:
        """Returns how long the worker takes from the home's answer to its next request; some are slower than rounds."""
        return self._chance.choice([0.5, 1.5]) if self._is_slow and not self._world.network.is_healed else 0.0

    async def _die(self, doing: "asyncio.Task[None]") -> None:
        """Ends the client in the middle of what it does, as the end of the process does."""
        if doing.cancel():
            await asyncio.wait([doing])
        elif (error := doing.exception()) is not None:
            raise error
        self.transport.abandon()
        self._world.count("a client dies")
        self._world.note(f"{self.name} dies")
        self._begin()

    async def _tried(self, action: Any) -> None:
        name = self._chance.choice(NAMES)
        try:
            async with asyncio.timeout(_LONGEST):
                await action(name)
        except TimeoutError as error:
            if isinstance(error, gradserve.GradserveError):
                self._failed_with(name, action, error)
            else:
                raise BrokenPromiseError(f"{self.name} waits for ever in {action.__name__}") from None
        except gradserve.GradserveError as error:
            self._failed_with(name, action, error)

    def _failed_with(self, name: str, action: Any, error: gradserve.GradserveError) -> None:
        self._world.note(f"{self.name} {action.__name__} {name}: {type(error).__name__}: {error}"[:300])
        self._world.count(type(error).__name__)
        if isinstance(error, gradserve.AbortedError) and error.field == LOST_FIELD:
            self._world.check_may_be_lost(self.transport, str(error))
        elif isinstance(error, gradserve.LostError):
            is_shared = error.accumulator in NAMES
            check(not (is_shared and self._world.is_durable(error.accumulator)), f"it is durable, and {error}")
        elif is_of_earlier(error):
            raise BrokenPromiseError(f"the home still has it, and {error}") from error
        elif isinstance(error, gradserve.AlreadyExistsError | gradserve.InternalError | gradserve.InvalidArgumentError):
            raise BrokenPromiseError(f"{type(error).__name__}: {error}") from error

    async def accumulator(self, name: str) -> Any:
        """Returns an accumulator, which is made if it is not there."""
        if name not in self.opened:
            spec = self._world.specs[name]
            self.opened[name] = await self.client.gradient_accumulator(
                MODEL,
                name,
                sharded=True,
                deterministic=spec.deterministic,
                keep_averages=spec.keep_averages,
                durability=spec.durability,
            )
            self._world.note(f"{self.name} opens {name}")
        return self.opened[name]

    # Calls

    async def _push_pull(self, name: str) -> None:
        chance = self._chance
        await self._with_gradient(
            name, self._world.new_gradient(), None, chance.choice([1, 1, 1, 2] if self._world.is_calm else [1, 2, 2, 3])
        )

    async def _apply(self, name: str) -> None:
        await self._with_gradient(name, self._world.new_gradient(), None, 0)

    async def _send_again(self, name: str) -> None:
        """Makes a call again that has failed, as a program may."""
        if not self._failed:
            return
        name, call, number, step, num_required = self._failed.pop(self._chance.randrange(len(self._failed)))
        await self._with_gradient(name, number, (call, step), num_required)

    async def _with_gradient(self, name: str, number: int, again: tuple[CallId, int] | None, num_required: int) -> None:
        acc = await self.accumulator(name)
        if again is None:
            late = self._chance.choices([0, -1, 1], [0.9, 0.07, 0.03])[0]
            call, step = self._ids.new_call(), self._steps.get(name, 0) + late
        else:
            call, step = again
        self._world.truth.will_send(call, self._worker_id, number)
        what = f"{self.name}:{call.sequence} {'pushes' if num_required else 'applies'} g{number} at {step} to {name}"
        self._world.note(what)
        gradient = gradient_of(number)
        options: dict[str, Any] = {"worker_id": self._worker_id, "request_id": self._ids.request_id(call)}
        try:
            if num_required:
                timeout = self._chance.choice([0.5, 3.0, 10.0])
                self.transport.decided = None
                pulled = await acc.push_pull(
                    gradient, num_required, step, timeout=timeout, on_stale="return", **options
                )
                self._steps[name] = pulled.global_step
                self._world.note(f"{what}: {pulled.outcome.name}")
                if pulled.components:
                    self._check(name, pulled)
            else:
                applied = await acc.apply_grad(gradient, step, **options)
                self._steps[name] = applied.global_step
                self._world.note(f"{what}: {applied.outcome.name}")
        except gradserve.GradserveError as error:
            if isinstance(error, gradserve.NotFoundError):
                self.opened.pop(name, None)
            elif not isinstance(error, gradserve.AbortedError):
                self._failed.append((name, call, number, step, num_required))
            raise

    async def _take(self, name: str) -> None:
        acc = await self.accumulator(name)
        await self._checked(
            name,
            acc.take_grad(
                1 if self._world.is_calm else self._chance.choice([1, 2, 3]), timeout=self._chance.choice([0.5, 5.0])
            ),
        )

    async def _read(self, name: str) -> None:
        acc = await self.accumulator(name)
        step = self._chance.choice([None, self._steps.get(name, 0), self._steps.get(name, 0) + 1])
        timeout = 0.0 if self._world.is_calm else self._chance.choice([0.0, 0.5, 3.0])
        await self._checked(name, acc.read_average(step, timeout=timeout))

    async def _set_step(self, name: str) -> None:
        acc = await self.accumulator(name)
        by = self._chance.choice([-100, -2, 1]) if self._world.is_calm else self._chance.randint(-2, 3)
        step = max(self._steps.get(name, 0) + by, 0)
        self._world.note(f"{self.name} sets the step of {name} to {step}")
        await self._checked(name, acc.set_global_step(step))
        self._steps[name] = step
        if self._world.is_calm:
            await self._apply(name)
            await self._repeat_old_decision(name)

    async def _repeat_old_decision(self, _name: str) -> None:
        """Has a server see what a home has said long ago, as a message does that was on its way for long."""
        requests = self.transport.requests
        if not requests:
            return
        target, method, data = self._chance.choice(requests)
        self._world.note(f"{self.name} tells server {target} again what a home has said")
        self._world.count("an old decision is repeated")
        with suppress(gradserve.AbortedError, gradserve.NotFoundError, gradserve.UnavailableError, TimeoutError):
            await self._world.network.ask(self.name, target, method, data, 5.0)

    async def _delete(self, name: str) -> None:
        self._world.note(f"{self.name} deletes {name}")
        self._world.deleting.add(name)
        await self.client.delete_accumulator(name)
        self.opened.pop(name, None)

    async def _private(self, _name: str) -> None:
        """Uses an accumulator that ends with this client, and does not delete it."""
        acc = await self.client.gradient_accumulator(MODEL, sharded=True, durability="none")
        number, call = self._world.new_gradient(), self._ids.new_call()
        self._world.truth.will_send(call, self._worker_id, number)
        request_id = self._ids.request_id(call)
        await acc.apply_grad(gradient_of(number), 0, worker_id=self._worker_id, request_id=request_id)
        if self._chance.random() < 0.5:
            await self._checked("", acc.take_grad(1, timeout=5.0))

    async def _checked(self, name: str, call: Any) -> Any:
        self.transport.decided = None
        try:
            found = await call
        except gradserve.NotFoundError:
            self.opened.pop(name, None)
            raise
        if found is not None:
            self._check(name, found)
        return found

    def _check(self, name: str, average: Any) -> None:
        decided = self.transport.decided
        self._world.note(f"{self.name} has round {decided.round - 1} of {name}")
        self._world.truth.check_average(decided, average.gradients)
        self._steps[name] = max(average.step, self._steps.get(name, 0))

    # The end

    async def round_with_others(self, name: str, step: int, num_workers: int) -> Any:
        """Takes part in a round of all workers, which must end."""
        acc = await self.accumulator(name)
        call, number = self._ids.new_call(), self._world.new_gradient()
        self._world.truth.will_send(call, self._worker_id, number)
        options: dict[str, Any] = {"worker_id": self._worker_id, "request_id": self._ids.request_id(call)}
        return await self._checked(name, acc.push_pull(gradient_of(number), num_workers, step, timeout=60.0, **options))
