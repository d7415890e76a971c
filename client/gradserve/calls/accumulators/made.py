"""The accumulators that a client makes."""

from gradserve.calls.accumulators.components import Components
from gradserve.calls.accumulators.wire import AccumulatorOptions, AccumulatorWire, create
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.naming import private_name
from gradserve.calls.private_resources import PrivateResources
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_text


class MadeAccumulators:
    """Creates a client's accumulators. Safe to use from several threads."""

    def __init__(self, ids: RequestIds, private: PrivateResources) -> None:
        """Takes the client's request ids and private resources."""
        self._ids = ids
        self._private = private

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
        creation = create(full_name, components, options, lifetime, self._ids, self.deleted)
        return (yield from self._private.create(full_name, creation) if is_private else creation)

    def deleted(self, name: str) -> None:
        """Forgets an accumulator that was deleted."""
        self._private.deleted(name)
