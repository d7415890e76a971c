"""Clients that own accumulators, layers and stored tensors, and die without a word."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.layers.batch_norm.layer import ForwardCall
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.ops.runner import open_inputs
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.rpc.batch_norm_layers.service import OutputsGradient, deliver_backward, deliver_forward
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.storage.journal import Durability
from gradserve_server.tensors.incoming import IncomingTensor, IncomingTensors, Inline, Stored
from gradserve_server.tensors.spec import TensorSpec
from tests.accumulators.gradients import gradient_of
from tests.layers.bench import config_of
from tests.simulation.clock import Moment
from tests.simulation.leases.truth import Owned
from tests.simulation.network import LostError
from tests.simulation.promises import check

if TYPE_CHECKING:
    from tests.simulation.leases.part import Leases

CONTAINER = "owned"
_F32 = np.dtype(np.float32)
_SHAPE = (4, 4)
_NEVER_STALE = 1 << 40
_THREADS = 2
"""How much an owner does at the same time."""
_MOST = 4
"""The most handles that an owner keeps in mind."""
_CALL = Call("of an owner")


class Owner:
    """One client after the other, each of which ends without a word."""

    def __init__(self, name: str, part: "Leases", chance: random.Random) -> None:
        self.name = name
        self._part = part
        self._truth = part.truth
        self._world = part.world
        self._chance = chance
        self._compute = InlineCompute()
        self._next = 0
        self._begin()

    def _begin(self) -> None:
        """Begins another client."""
        self._next += 1
        self.client_id = f"{self.name}-{self._next}"
        self._holds = self._chance.random() < 0.5
        self._accumulators: list[Owned] = []
        self._layers: list[Owned] = []
        self._handles: list[str] = []
        self._reading: list[str] = []
        """Those that it has read last, and may be reading."""

    async def work(self) -> None:
        """Is one client after the other, until the world ends."""
        while not self._world.is_over:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._act()) for _ in range(_THREADS)]
                if self._holds:
                    tasks.append(group.create_task(self._hold()))
                await asyncio.sleep(self._chance.uniform(1, 15))
                for task in tasks:
                    task.cancel()
            self._world.count("a client dies")
            self._world.note(f"{self.client_id} dies")
            self._begin()

    async def _hold(self) -> None:
        """Keeps a call under way that holds the lease, as long as the network lets it."""
        client_id = self.client_id

        async def serve() -> bool:
            self._part.look()
            lease = self._truth.clients.get(client_id)
            with self._truth.using([] if lease is None else [lease]):
                return await self._world.server.lifetimes.clients.hold(client_id)

        while True:
            try:
                await self._world.network.ask(self.name, serve, self._chance.choice([1.0, 3.0, 6.0]), holds_lease=True)
            except LostError:
                self._world.note(f"{client_id} does not hold its lease")
            await asyncio.sleep(self._chance.choice([0.05, 0.5]))

    async def _act(self) -> None:
        """Asks for one thing after the other."""
        actions: list[tuple[float, Any]] = [
            (0.10, self._create_accumulator),
            (0.10, self._create_layer),
            (0.20, self._put),
            (0.20, self._apply),
            (0.20, self._take),
            (0.15, self._read),
            (0.10, self._forward),
            (0.10, self._backward),
            (0.06, self._delete_tensor),
            (0.04, self._delete),
            (0.02, self._close),
            (0.05, self._idle),
        ]
        weights = [weight for weight, _ in actions]
        while True:
            await asyncio.sleep(self._chance.choice([0.0, 0.02, 0.3, 1.0]))
            (_, action) = self._chance.choices(actions, weights)[0]
            await action()

    async def _idle(self) -> None:
        await asyncio.sleep(self._chance.choice([2.0, 8.0]))

    # Accumulators and layers

    def _lifetime(self) -> Lifetime:
        idle = self._chance.choice([None, None, 3.0])
        is_private = idle is None or self._chance.random() < 0.7
        return Lifetime(self.client_id if is_private else "", idle)

    async def _create_accumulator(self) -> None:
        lifetime, durability = self._lifetime(), self._chance.choice(list(Durability))
        key = self._new_key()
        spec = AccumulatorSpec((ComponentSpec("", _F32),), durability=durability)
        registry = self._world.server.accumulators

        async def serve() -> None:
            accumulator, is_new = registry.create(key, spec, lifetime)
            await self._created(key, accumulator.incarnation, lifetime, durability, is_new, self._accumulators)
            await registry.settle()
            self._promised(accumulator.incarnation)

        await self._send(serve, f"create accumulator {key}: {durability.name}, {lifetime}")

    async def _create_layer(self) -> None:
        lifetime, durability = self._lifetime(), self._chance.choice(list(Durability))
        key = self._new_key()
        config = config_of(fused=False, durability=durability)
        registry = self._world.server.layers

        async def serve() -> None:
            layer, is_new = registry.create(key, config, Reuse.ALLOWED, "", lifetime)
            await self._created(key, layer.incarnation, lifetime, durability, is_new, self._layers)
            await registry.settle()
            self._promised(layer.incarnation)

        await self._send(serve, f"create layer {key}: {durability.name}, {lifetime}")

    def _new_key(self) -> ResourceKey:
        self._next += 1
        return ResourceKey(CONTAINER, f"{self.name}-{self._next}")

    async def _created(
        self,
        key: ResourceKey,
        incarnation: str,
        lifetime: Lifetime,
        durability: Durability,
        is_new: bool,
        mine: list[Owned],
    ) -> None:
        if is_new:
            is_durable = durability is not Durability.NONE
            owned = Owned(key, incarnation, lifetime.owner, lifetime.idle_lease, is_durable)
            self._truth.created(owned)
            mine.append(owned)
        else:  # a second copy of the call has renewed its leases
            with self._truth.using(self._truth.owned[incarnation].leases):
                pass

    def _promised(self, incarnation: str) -> None:
        if not self._world.is_over and self._world.server.failure is None:
            self._truth.owned[incarnation].is_promised = True

    async def _delete(self) -> None:
        owned = self._any(self._accumulators + self._layers)
        if owned is None:
            return
        server = self._world.server
        registry: Any = server.accumulators if owned in self._accumulators else server.layers

        async def serve() -> None:
            owned.deleting = True
            registry.delete(owned.key, owned.incarnation)
            await server.store.flush()
            if not self._world.is_over and server.failure is None:
                owned.is_deleted = True

        await self._send(serve, f"delete {owned}")

    async def _close(self) -> None:
        """Says that it ends, though it does not."""
        client_id = self.client_id

        async def serve() -> None:
            for owned in self._truth.owned.values():
                owned.deleting |= owned.owner == client_id
            await self._world.server.lifetimes.clients.end(client_id)

        await self._send(serve, f"close {client_id}")

    def _any(self, owned: Sequence[Owned]) -> Owned | None:
        """Returns one of those that it knows of, which may be gone."""
        return self._chance.choice(owned[-2:]) if owned else None

    # Tensors

    async def _put(self) -> None:
        count, lease = self._chance.choice([1, 1, 3]), self._chance.choice([2.5, 6.0])
        number, delay = self._next, self._chance.choice([0.0, 0.1])
        self._next += count
        store = self._world.server.tensors

        async def serve() -> None:
            with self._truth.arriving(), store.receive([TensorSpec(_F32, _SHAPE)] * count, lease) as upload:
                for index, array in enumerate(upload.arrays):
                    array[...] = number + index
                await asyncio.sleep(delay)
                begun = self._world.moment
                handles = await store.store(upload)
                for handle, array in zip(handles, upload.arrays, strict=True):
                    self._stored(handle, array, lease, begun)

        await self._send(serve, f"put {count}")

    async def _read(self) -> None:
        handles = self._some_handles()
        delay = self._chance.choice([0.0, 0.05, 4.0])
        server, truth = self._world.server, self._truth

        async def serve() -> None:
            # Before the use begins: while it does, somebody may delete them, and the use goes on.
            contents = {handle: truth.tensors[handle].content for handle in handles if handle in truth.tensors}
            async with server.tensors.use(handles) as held:
                await asyncio.sleep(delay)
                for handle, array in held.arrays.items():
                    check(array.tobytes() == contents[handle], f"tensor {handle} has changed")

        if handles:
            self._reading = handles
            await self._send(serve, f"read {' '.join(handles)}", handles=handles)

    async def _delete_tensor(self) -> None:
        handles = self._some_handles()

        async def serve() -> None:
            self._truth.deleted(handles)
            self._world.server.tensors.delete(handles)

        if handles:
            await self._send(serve, f"delete {' '.join(handles)}")

    def _some_handles(self) -> list[str]:
        """Returns some of the handles that it knows of, whose tensors may be gone."""
        count = min(len(self._handles), self._chance.choice([1, 1, 2]))
        return self._chance.sample(self._handles, count)

    def _stored(self, handle: str, array: Any, lease: float, begun: Moment) -> None:
        self._truth.stored(handle, array, lease, begun)
        if array.shape == _SHAPE:
            self._handles = [*self._handles[1 - _MOST :], handle]

    # Calls

    async def _apply(self) -> None:
        owned = self._any(self._accumulators)
        if owned is not None:
            for _ in range(self._chance.choice([1, 2])):
                await self._apply_to(owned)

    async def _apply_to(self, owned: Owned) -> None:
        handles = self._some_handles()[:1] if self._chance.random() < 0.5 else self._reading[:1]
        by_handle, release = bool(handles) and self._chance.random() < 0.8, self._chance.random() < 0.5
        self._next += 1
        request = RequestId(self.client_id, self._next, b"")
        tensor: IncomingTensor = Stored("", handles[0]) if by_handle else Inline("", np.ones(_SHAPE, np.float32))
        server = self._world.server

        async def serve() -> None:
            with server.accumulators.use(owned.key, owned.incarnation) as accumulator, self._truth.using(owned.leases):
                given = gradient_of({"": tensor}, release=release)
                receiver = GradientReceiver(server.opener, self._compute, Reducer(ForkJoin(1)))
                opening: Any = partial(receiver.open, accumulator.spec, accumulator.place, given)
                await accumulator.apply(request, Contribution(_NEVER_STALE), opening)

        what = f"apply {handles[0] if by_handle else ''}{' and release it' * release} to {owned}"
        await self._send(serve, what, owned, handles if by_handle else [])

    async def _take(self) -> None:
        owned = self._any(self._accumulators)
        if owned is None:
            return
        placement, encoding = self._placement(), self._chance.choice([0.0, 0.3, 1.0])
        num_required, timeout = self._chance.choice([1, 2, 3]), self._chance.choice([0.1, 5.0])
        server = self._world.server

        async def serve() -> None:
            with (
                server.accumulators.use(owned.key, owned.incarnation) as accumulator,
                self._truth.using(owned.leases),
                self._truth.arriving(),
                server.deliverer.begin(placement, _CALL) as outgoing,
            ):
                average, _ = await accumulator.take(None, num_required, timeout)
                begun = self._world.moment
                await outgoing.add(average.arrays, shared=True)
                await asyncio.sleep(encoding)
                self._received(outgoing.handles, average.arrays, placement, begun)

        await self._send(serve, f"take from {owned}", owned)

    async def _forward(self) -> None:
        owned, handles = self._any(self._layers), self._some_handles()[:1]
        if owned is None or not handles:
            return
        self._next += 1
        placement, call = self._placement(), ForwardCall(forward_id=f"{self.name}:{self._next}", lease=3.0)
        server = self._world.server

        async def serve() -> None:
            with (
                server.layers.use(owned.key, owned.incarnation) as layer,
                self._truth.using(owned.leases),
                self._truth.arriving(),
                server.deliverer.begin(placement, _CALL) as outgoing,
            ):
                inputs = IncomingTensors([Stored("inputs", handles[0])])
                async with open_inputs(server.opener, inputs, CallInputs) as opened:
                    begun = self._world.moment
                    result = await deliver_forward(layer, opened, call, outgoing)
                    self._received(outgoing.handles, [result.outputs], placement, begun)
                    owned.forwards.append(call.forward_id)

        await self._send(serve, f"forward {handles[0]} through {owned}", owned, handles)

    async def _backward(self) -> None:
        owned, handles = self._any(self._layers), self._some_handles()[:1]
        if owned is None or not handles or not owned.forwards:
            return
        placement, forward_id = self._placement(), self._chance.choice(owned.forwards)
        retain = self._chance.random() < 0.3
        server = self._world.server

        async def serve() -> None:
            with (
                server.layers.use(owned.key, owned.incarnation) as layer,
                self._truth.using(owned.leases),
                self._truth.arriving(),
                server.deliverer.begin(placement, _CALL) as outgoing,
            ):
                inputs = IncomingTensors([Stored("outputs_gradient", handles[0])])
                async with open_inputs(server.opener, inputs, OutputsGradient) as opened:
                    begun = self._world.moment
                    await deliver_backward(layer, opened, forward_id, outgoing, retain=retain)
                    arrays = [server.tensors._entries[handle].array for handle in outgoing.handles]
                    self._received(outgoing.handles, arrays, placement, begun)

        await self._send(serve, f"backward {forward_id} through {owned}", owned, handles, may_be_lost=True)

    def _placement(self) -> tensor_pb2.Placement:
        lease = encode_duration(self._chance.choice([2.5, 6.0]))
        return tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP, lease=lease)

    def _received(
        self, handles: Sequence[str], arrays: Sequence[Any], placement: tensor_pb2.Placement, begun: Moment
    ) -> None:
        for handle, array in zip(handles, arrays, strict=True):
            self._stored(handle, array, placement.lease.ToNanoseconds() * 1e-9, begun)

    # The network

    async def _send(
        self,
        serve: Callable[[], Awaitable[None]],
        what: str,
        owned: Owned | None = None,
        handles: Sequence[str] = (),
        *,
        may_be_lost: bool = False,
    ) -> None:
        world, client_id = self._world, self.client_id
        world.note(f"{client_id}: {what}")
        patience = self._chance.choice([0.01, 0.2]) if self._chance.random() < 0.15 else 5.0

        async def answered() -> None:
            self._part.look()  # things may have ended in this turn of the loop
            try:
                await serve()
            except DeadlineExceededError:
                pass
            except ServiceError as error:
                if world.is_over:
                    return
                world.note(f"{what}: {type(error).__name__}")
                self._part.look()
                is_missing = isinstance(error, NotFoundError | AbortedError)
                is_gone = owned is not None and not owned.is_alive
                are_gone = not all(map(self._truth.is_there, handles))
                is_full = isinstance(error, ResourceExhaustedError) and world.was_full
                has_failed = isinstance(error, UnavailableError) and world.server.failure is not None
                is_allowed = (is_missing and (is_gone or are_gone or may_be_lost)) or is_full or has_failed
                check(is_allowed, f"{what}: {type(error).__name__}: {error}")

        try:
            await world.network.ask(self.name, answered, patience)
        except LostError:
            world.note(f"{what}: no answer within {patience:g} s")
