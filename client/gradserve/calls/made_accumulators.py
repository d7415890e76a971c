"""The accumulators that a client made."""

import threading

from gradserve.calls.accumulator_wire import AccumulatorOptions, AccumulatorWire, create
from gradserve.calls.components import Components
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.naming import private_name
from gradserve.conversion.argument import Argument
from gradserve.conversion.plain import as_text


class MadeAccumulators:
    """Creates accumulators, and knows those without a shared name until they are deleted.

    Safe to use from several threads.
    """

    def __init__(self, ids: RequestIds) -> None:
        """Takes what numbers the calls of the client."""
        self._ids = ids
        self._lock = threading.Lock()
        self._private: dict[str, AccumulatorWire] = {}

    def create(
        self,
        name: str,
        shared_name: str | None,
        components: Components,
        options: AccumulatorOptions,
    ) -> Operation[AccumulatorWire]:
        """Creates an accumulator, or finds the one of this shared name.

        Args:
            name: What the name of one without a shared name begins with.
            shared_name: Under which others find it; None for one that only this client uses.
            components: What it consists of.
            options: Its other properties.
        """
        name = as_text(name, Argument("name"))
        shared_name = None if shared_name is None else as_text(shared_name, Argument("shared_name"))
        full_name = private_name(name, self._ids) if shared_name is None else shared_name
        wire = yield from create(full_name, components, options, self._ids)
        if shared_name is None:
            with self._lock:
                self._private[full_name] = wire
        return wire

    def deleted(self, name: str) -> None:
        """Forgets an accumulator that was deleted."""
        with self._lock:
            self._private.pop(name, None)

    def delete_private(self) -> Operation[None]:
        """Deletes the accumulators without a shared name."""
        with self._lock:
            left = dict(self._private)
        for name, wire in left.items():
            yield from wire.delete()
            self.deleted(name)
