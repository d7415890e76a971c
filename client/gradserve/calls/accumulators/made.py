"""The accumulators that a client makes."""

from __future__ import annotations

from gradserve.calls.accumulators.aimed import AimedWire
from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.creation import (
    AccumulatorOptions,
    create,
    creation_of,
    delete,
    list_accumulators,
)
from gradserve.calls.accumulators.kept import KeptMemory
from gradserve.calls.accumulators.session import AccumulatorSession
from gradserve.calls.accumulators.settling import not_durable, settle
from gradserve.calls.accumulators.watch import Watch
from gradserve.calls.accumulators.wire import AccumulatorWire
from gradserve.calls.cluster import Cluster
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.naming import private_name
from gradserve.calls.private_resources import PrivateResources
from gradserve.calls.together import at_target, together
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_text
from gradserve.errors import GradserveError, NotDurableError
from gradserve.results import AccumulatorHandle, AccumulatorInfo, AccumulatorKind, DenseSpec, SparseSpec
from gradserve.v1 import accumulator_pb2
from gradserve.wire.homes import DEFAULT_CONTAINER


class MadeAccumulators:
    """Creates a client's accumulators, each on its home among the servers. Safe to use from several threads."""

    def __init__(self, ids: RequestIds, cluster: Cluster, private: list[PrivateResources], memory: KeptMemory) -> None:
        """Takes the state of the client.

        Args:
            ids: Its request ids.
            cluster: Its servers.
            private: Its private resources on each of them.
            memory: The memory of the gradients that it keeps.
        """
        self._ids = ids
        self._cluster = cluster
        self._servers = [
            _AccumulatorsOfServer(ids, cluster, target, each, memory) for target, each in enumerate(private)
        ]

    @property
    def watches(self) -> list[Watch]:
        """What watches over the gradients that the client keeps, of each server."""
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
        server = self._home_of(as_text(options.container, Argument("container")), full_name)
        return server.create(full_name, components, options, is_private=is_private)

    def wire_of(self, handle: AccumulatorHandle) -> AccumulatorWire:
        """Returns the operations on the accumulator of a handle, which another client may have made."""
        return self._home_of(handle.container, handle.name).wire_of(handle)

    def delete(self, container: str, name: str) -> Operation[bool]:
        """Deletes an accumulator by its name; returns whether it existed."""
        return self._home_of(container, name).delete(container, name)

    def list_all(self, container: str) -> Operation[list[AccumulatorInfo]]:
        """Describes the accumulators of a container, on all servers, sorted by name."""
        if self._cluster.size == 1:
            return (yield from list_accumulators(container))
        lists = yield from together(*[at_target(each.target, list_accumulators(container)) for each in self._servers])
        return sorted((info for found in lists for info in found), key=lambda info: info.name)

    def settle(self, seconds: float) -> Operation[None]:
        """Waits until no gradient is kept on any server; see `gradserve.calls.accumulators.settling`."""
        if self._cluster.size == 1:
            return (yield from settle(self._servers[0].watch, seconds))
        errors = yield from together(*[at_target(each.target, _settled(each.watch, seconds)) for each in self._servers])
        for error in errors:
            if error is not None:
                raise error

    def not_durable(self) -> NotDurableError | None:
        """Returns the error that names what is not durable on the first server of which something is not."""
        return next((error for each in self.watches if (error := not_durable(each, 0)) is not None), None)

    def _home_of(self, container: str, name: str) -> _AccumulatorsOfServer:
        return self._servers[self._cluster.home_of(container, name)]


class _AccumulatorsOfServer:
    """Creates accumulators on one server."""

    def __init__(
        self, ids: RequestIds, cluster: Cluster, target: int, private: PrivateResources, memory: KeptMemory
    ) -> None:
        self.target = target
        self.watch = Watch()
        self._ids = ids
        self._cluster = cluster
        self._private = private
        self._memory = memory

    def create(
        self, name: str, components: Components, options: AccumulatorOptions, *, is_private: bool
    ) -> Operation[AccumulatorWire]:
        operation = self._create(name, components, options, is_private=is_private)
        return operation if self._cluster.size == 1 else at_target(self.target, operation)

    def wire_of(self, handle: AccumulatorHandle) -> AccumulatorWire:
        ref = accumulator_pb2.AccumulatorRef(
            container=handle.container, name=handle.name, incarnation=handle.incarnation
        )
        info = accumulator_pb2.AccumulatorInfo(accumulator=ref)
        spec = SparseSpec if handle.kind is AccumulatorKind.SPARSE else DenseSpec
        session = self.watch.session(ref) or AccumulatorSession(info, self._memory)
        return self._wire(session, Components.of_one_tensor(spec(handle.dtype)))

    def delete(self, container: str, name: str) -> Operation[bool]:
        ref = accumulator_pb2.AccumulatorRef(container=container, name=name)
        deleted = yield from at_target(self.target, delete(ref))
        self.deleted(container or DEFAULT_CONTAINER, name)
        return deleted

    def deleted(self, container: str, name: str) -> None:
        """Forgets an accumulator that was deleted."""
        self._private.deleted(name)
        self.watch.remove(container, name)

    def _create(
        self, name: str, components: Components, options: AccumulatorOptions, *, is_private: bool
    ) -> Operation[AccumulatorWire]:
        lifetime = self._private.lifetime(options.idle_lease, is_private=is_private)
        request = creation_of(name, components, options, lifetime)
        request.accumulator.member = yield from self._cluster.member(self.target)

        def made() -> Operation[accumulator_pb2.AccumulatorInfo]:
            return self._private.create(name, create(request)) if is_private else create(request)

        info = yield from made()
        session = AccumulatorSession(info, self._memory, made, self.watch.begin, is_private=is_private)
        return self._wire(self.watch.add(session), components, has_default_workers=not options.deterministic)

    def _wire(
        self, session: AccumulatorSession, components: Components, *, has_default_workers: bool = True
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


def _settled(watch: Watch, seconds: float) -> Operation[GradserveError | None]:
    """Settles; returns the error, so that it does not end what runs together with it."""
    try:
        yield from settle(watch, seconds)
    except GradserveError as error:
        return error
    return None
