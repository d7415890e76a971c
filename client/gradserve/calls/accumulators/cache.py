"""The accumulators that a client has created or found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from typing import Any

from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.creation import (
    AccumulatorOptions,
    create,
    creation_of,
    delete,
    describe,
    list_accumulators,
)
from gradserve.calls.accumulators.kept import KeptMemory
from gradserve.calls.accumulators.session import RoundSession, Watch, not_durable, settle
from gradserve.calls.accumulators.sharding.shard import Parts, Uncounted, add_plan, as_wish, is_of_earlier, is_sharded
from gradserve.calls.accumulators.sharding.wire import ShardedWire
from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.calls.combinators import all_ended, at_target, together
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds, private_name
from gradserve.calls.lease import ClientLease
from gradserve.calls.server import Cluster
from gradserve.conversion.plain import as_text
from gradserve.results import AccumulatorHandle, AccumulatorInfo, AccumulatorKind, DenseSpec, SparseSpec
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import AbortedError, InvalidArgumentError, NotDurableError, NotFoundError
from gradserve_protocol.placement import DEFAULT_CONTAINER, Plan, plan_of
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2


class AimedWire(AccumulatorWire):
    """The operations on one accumulator, sent to its home. Clients of a single server use `AccumulatorWire` itself."""

    def _gradient_fields(self, *args: Any, has_handles: bool) -> dict[str, Any]:
        if has_handles:
            raise InvalidArgumentError(
                f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and accumulator "
                f"{self.ref.name!r} is on server {self.target}",
                field="gradient",
            )
        return super()._gradient_fields(*args, has_handles=has_handles)


def _aimed(operation: Callable[..., Operation[Any]]) -> Callable[..., Operation[Any]]:
    @wraps(operation)
    def at_home(self: AimedWire, *args: Any, **kwargs: Any) -> Operation[Any]:
        return at_target(self.target, operation(self, *args, **kwargs))

    return at_home


for _name in ("apply", "take", "push_pull", "read_average", "num_accumulated", "set_global_step", "info", "delete"):
    setattr(AimedWire, _name, _aimed(getattr(AccumulatorWire, _name)))


class AccumulatorCache:
    """Creates a client's accumulators, each on its home among the servers. Safe to use from several threads."""

    def __init__(self, ids: RequestIds, cluster: Cluster, leases: list[ClientLease], memory: KeptMemory) -> None:
        """Takes the state of the client.

        Args:
            ids: Its request ids.
            cluster: Its servers.
            leases: Its lease at each of them.
            memory: The memory of the gradients that it keeps.
        """
        self._ids = ids
        self._uncounted = Uncounted()
        self._cluster = cluster
        self._servers = [
            _AccumulatorsOfServer(ids, cluster, target, each, memory) for target, each in enumerate(leases)
        ]

    @property
    def watches(self) -> list[Watch]:
        """The watch over the gradients that the client keeps, for each server."""
        return [each.watch for each in self._servers]

    def create(
        self,
        name: str,
        shared_name: str | None,
        components: Components,
        options: AccumulatorOptions,
    ) -> Operation[AccumulatorWire]:
        """Creates an accumulator, or finds the one with this shared name.

        Args:
            name: The prefix of the name of an accumulator without a shared name.
            shared_name: The name by which others find it; None for one that only this client uses.
            components: Its components.
            options: Its other properties.
        """
        name = as_text(name, Argument("name"))
        is_private = shared_name is None
        full_name = private_name(name, self._ids) if is_private else as_text(shared_name, Argument("shared_name"))
        home = self._home_of(as_text(options.container, Argument("container")), full_name)
        wanted = as_wish(options.sharded)
        if self._cluster.size > 1 and is_sharded(wanted, components, options.device):
            plan = plan_of(components, home.target, self._cluster.size)
            return self._create_sharded(home, full_name, components, plan, options, is_private=is_private)
        return home.create(full_name, components, options, wanted, is_private=is_private)

    def wire_of(self, handle: AccumulatorHandle) -> AccumulatorWire:
        """Returns the operations on the accumulator of a handle, which another client may have made."""
        return self._home_of(handle.container, handle.name).wire_of(handle)

    def delete(self, container: str, name: str) -> Operation[bool]:
        """Deletes an accumulator by its name; returns whether it existed."""
        home = self._home_of(container, name)
        if self._cluster.size == 1 or (yield from home.has_whole(container, name)):
            return (yield from home.delete(container, name)).deleted
        # First at its home, which would name gradients that others have no more if it stayed. Then also what is left on
        # other servers of one that its home has lost, but nothing of one that somebody makes in between.
        at_home = yield from home.delete(container, name)
        others = [each.delete(container, name, at_home.home_incarnation) for each in self._servers if each is not home]
        return any(each.deleted for each in [at_home, *(yield from all_ended(*others))])

    def list_all(self, container: str) -> Operation[list[AccumulatorInfo]]:
        """Describes the accumulators of a container, on all servers, sorted by name."""
        if self._cluster.size == 1:
            return (yield from list_accumulators(container))
        lists = yield from together(*[at_target(each.target, list_accumulators(container)) for each in self._servers])
        sizes = Counter[str]()
        for info in chain.from_iterable(lists):
            sizes[info.name] += info.num_bytes
        at_home = [
            replace(info, num_bytes=sizes[info.name])
            for target, found in enumerate(lists)
            for info in found
            if not info.num_shards or self._cluster.home_of(container, info.name) == target
        ]
        return sorted(at_home, key=lambda info: info.name)

    def settle(self, seconds: float) -> Operation[None]:
        """Waits until no gradient is kept on any server; see `gradserve.calls.accumulators.session`."""
        if self._cluster.size == 1:
            return (yield from settle(self._servers[0].watch, seconds, self._ids.clock))
        settled = [at_target(each.target, settle(each.watch, seconds, self._ids.clock)) for each in self._servers]
        yield from all_ended(*settled)

    def not_durable(self) -> NotDurableError | None:
        """Returns the error that names what is not durable on the first server of which something is not."""
        return next((error for each in self.watches if (error := not_durable(each, 0)) is not None), None)

    def _create_sharded(
        self,
        home: _AccumulatorsOfServer,
        name: str,
        components: Components,
        plan: Plan,
        options: AccumulatorOptions,
        *,
        is_private: bool,
    ) -> Operation[AccumulatorWire]:
        """Creates an accumulator on its home, and then on all other servers that have a part of it."""
        parts = Parts(components, plan)
        request = home.request(name, components, options, is_private=is_private)
        add_plan(request.spec, plan, self._cluster.size)
        request.accumulator.member = yield from self._cluster.member(home.target)
        members = yield from self._cluster.members(parts.servers)
        earlier = ""
        while True:
            info = yield from at_target(home.target, home.made(request, is_private=is_private))
            creations = {
                target: partial(self._created_part, target, self._of_part(request, member, info), is_private=is_private)
                for target, member in members.items()
                if target != home.target
            }
            try:
                yield from together(*[create_part(info.accumulator.incarnation) for create_part in creations.values()])
            except AbortedError as error:
                # It was deleted since. If it was not, its home makes incarnations that others take for earlier ones.
                if not is_of_earlier(error) or info.accumulator.incarnation == earlier:
                    raise
                earlier = info.accumulator.incarnation
            else:
                break
        return ShardedWire(
            home.session(info, request, options, is_private=is_private),
            components,
            self._ids,
            has_default_workers=not options.deterministic,
            deleted=self._deleted,
            target=home.target,
            parts=parts,
            members=members,
            creations=creations,
            uncounted=self._uncounted,
            idle_lease=None if options.idle_lease is None else float(options.idle_lease),
        )

    @staticmethod
    def _of_part(
        request: messages_pb2.CreateAccumulatorRequest, member: str, info: accumulator_pb2.AccumulatorInfo
    ) -> messages_pb2.CreateAccumulatorRequest:
        """Returns the request for the part of another server than the home, which has answered a description."""
        other = messages_pb2.CreateAccumulatorRequest()
        other.CopyFrom(request)
        other.accumulator.member = member
        other.spec.durability = info.spec.durability  # if that is none in particular, servers may differ
        return other

    def _created_part(
        self, target: int, of_part: messages_pb2.CreateAccumulatorRequest, home_incarnation: str, *, is_private: bool
    ) -> Operation[accumulator_pb2.AccumulatorInfo]:
        request = messages_pb2.CreateAccumulatorRequest()
        request.CopyFrom(of_part)
        request.home_incarnation = home_incarnation
        return at_target(target, self._servers[target].made(request, is_private=is_private))

    def _deleted(self, container: str, name: str) -> None:
        for each in self._servers:
            each.deleted(container, name)

    def _home_of(self, container: str, name: str) -> _AccumulatorsOfServer:
        return self._servers[self._cluster.home_of(container, name)]


class _AccumulatorsOfServer:
    """Creates accumulators on one server."""

    def __init__(self, ids: RequestIds, cluster: Cluster, target: int, lease: ClientLease, memory: KeptMemory) -> None:
        self.target = target
        self.watch = Watch()
        self._ids = ids
        self._cluster = cluster
        self._lease = lease
        self._memory = memory

    def create(
        self, name: str, components: Components, options: AccumulatorOptions, wanted: bool | None, *, is_private: bool
    ) -> Operation[AccumulatorWire]:
        """Creates a whole accumulator; the only server of a client may be an aggregator, and shard it if wanted."""
        operation = self._create(name, components, options, wanted, is_private=is_private)
        return operation if self._cluster.size == 1 else at_target(self.target, operation)

    def wire_of(self, handle: AccumulatorHandle) -> AccumulatorWire:
        ref = accumulator_pb2.AccumulatorRef(
            container=handle.container, name=handle.name, incarnation=handle.incarnation
        )
        info = accumulator_pb2.AccumulatorInfo(accumulator=ref)
        spec = SparseSpec if handle.kind is AccumulatorKind.SPARSE else DenseSpec
        session = self.watch.session(ref) or RoundSession(info, self._memory)
        return self._wire(session, Components.of_one_tensor(spec(handle.dtype)))

    def delete(
        self, container: str, name: str, home_incarnation: str = ""
    ) -> Operation[messages_pb2.DeleteAccumulatorResponse]:
        ref = accumulator_pb2.AccumulatorRef(container=container, name=name)
        reply = yield from at_target(self.target, delete(ref, home_incarnation))
        self.deleted(container or DEFAULT_CONTAINER, name)
        return reply

    def deleted(self, container: str, name: str) -> None:
        """Forgets an accumulator that was deleted."""
        self._lease.deleted(name)
        self.watch.remove(container, name)

    def has_whole(self, container: str, name: str) -> Operation[bool]:
        """Returns whether an accumulator is on this server as a whole."""
        ref = accumulator_pb2.AccumulatorRef(container=container, name=name)
        try:
            info = yield from at_target(self.target, describe(ref))
        except NotFoundError:
            return False
        return not info.num_shards

    def request(
        self, name: str, components: Components, options: AccumulatorOptions, *, is_private: bool
    ) -> messages_pb2.CreateAccumulatorRequest:
        """Returns the request that creates an accumulator, without the member of the cluster."""
        lifetime = self._lease.lifetime(options.idle_lease, is_private=is_private)
        return creation_of(name, components, options, lifetime)

    def made(
        self, request: messages_pb2.CreateAccumulatorRequest, *, is_private: bool
    ) -> Operation[accumulator_pb2.AccumulatorInfo]:
        """Creates an accumulator, and keeps a private one alive; returns its description."""
        return self._lease.create(request.accumulator.name, create(request)) if is_private else create(request)

    def session(
        self,
        info: accumulator_pb2.AccumulatorInfo,
        request: messages_pb2.CreateAccumulatorRequest,
        options: AccumulatorOptions,
        *,
        is_private: bool,
    ) -> RoundSession:
        """Returns the session of an accumulator that was created.

        Args:
            info: Its description.
            request: What creates it again.
            options: What the program asked for.
            is_private: Whether it ends with this client.
        """
        session = RoundSession(
            info,
            self._memory,
            partial(self.made, request, is_private=is_private),
            self.watch.begin if self._cluster.size == 1 else lambda: at_target(self.target, self.watch.begin()),
            is_private=is_private,
            ends_when_lost=options.ends_when_lost,
        )
        return self.watch.add(session)

    def _create(
        self, name: str, components: Components, options: AccumulatorOptions, wanted: bool | None, *, is_private: bool
    ) -> Operation[AccumulatorWire]:
        request = self.request(name, components, options, is_private=is_private)
        if self._cluster.size == 1 and wanted is not None:
            request.sharded = wanted
        request.accumulator.member = yield from self._cluster.member(self.target)
        info = yield from self.made(request, is_private=is_private)
        session = self.session(info, request, options, is_private=is_private)
        return self._wire(session, components, has_default_workers=not options.deterministic)

    def _wire(
        self, session: RoundSession, components: Components, *, has_default_workers: bool = True
    ) -> AccumulatorWire:
        kind = AimedWire if self.target else AccumulatorWire
        return kind(
            session,
            components,
            self._ids,
            has_default_workers=has_default_workers,
            deleted=self.deleted,
            target=self.target,
        )
