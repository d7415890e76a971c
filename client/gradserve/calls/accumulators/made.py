"""The accumulators that a client makes."""

from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.kept import KeptMemory
from gradserve.calls.accumulators.session import AccumulatorSession
from gradserve.calls.accumulators.watch import Watch
from gradserve.calls.accumulators.wire import AccumulatorOptions, AccumulatorWire, create, creation_of
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.naming import private_name
from gradserve.calls.private_resources import PrivateResources
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_text
from gradserve.results import AccumulatorHandle, AccumulatorKind, DenseSpec, SparseSpec
from gradserve.v1 import accumulator_pb2


class MadeAccumulators:
    """Creates a client's accumulators. Safe to use from several threads."""

    def __init__(self, ids: RequestIds, private: PrivateResources, memory: KeptMemory) -> None:
        """Takes the client's request ids and private resources, and the memory of the gradients that it keeps."""
        self._ids = ids
        self._private = private
        self._memory = memory
        self.watch = Watch()

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
        lifetime = self._private.lifetime(options.idle_lease, is_private=is_private)
        request = creation_of(full_name, components, options, lifetime)

        def made() -> Operation[accumulator_pb2.AccumulatorInfo]:
            return self._private.create(full_name, create(request)) if is_private else create(request)

        info = yield from made()
        session = self.watch.add(AccumulatorSession(info, self._memory, made, self.watch.begin, is_private=is_private))
        return AccumulatorWire(
            session, components, self._ids, has_default_workers=not options.deterministic, deleted=self.deleted
        )

    def wire_of(self, handle: AccumulatorHandle) -> AccumulatorWire:
        """Returns the operations on the accumulator of a handle, which another client may have made."""
        ref = accumulator_pb2.AccumulatorRef(
            container=handle.container, name=handle.name, incarnation=handle.incarnation
        )
        info = accumulator_pb2.AccumulatorInfo(accumulator=ref)
        spec = SparseSpec if handle.kind is AccumulatorKind.SPARSE else DenseSpec
        session = self.watch.session(ref) or AccumulatorSession(info, self._memory)
        return AccumulatorWire(session, Components.of_one_tensor(spec(handle.dtype)), self._ids, deleted=self.deleted)

    def deleted(self, container: str, name: str) -> None:
        """Forgets an accumulator that was deleted."""
        self._private.deleted(name)
        self.watch.remove(container, name)
